"""Commands of finetune in messages, as a user can paste them."""

from __future__ import annotations

import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

PURPOSES = {
    "check": "check the recipe",
    "data": "check all examples",
    "plan": "estimate memory and time",
    "train": "train",
}


def command(*words: str) -> str:
    """Return a command of finetune that runs as printed."""
    return shlex.join([*program(), *words])


def next_step(*words: str) -> str:
    """Return a line with the next command and its purpose."""
    return f"next, {PURPOSES[words[0]]}: {command(*words)}"


@cache
def program() -> list[str]:
    """Return `finetune` if the PATH has this installation, else the path of its script or `python -m`."""
    script = Path(sys.executable).with_name("finetune")
    on_path = shutil.which("finetune")
    if on_path and (not script.exists() or Path(on_path).samefile(script)):
        return ["finetune"]
    return [str(script)] if script.exists() else [sys.executable, "-m", "finetune"]
