"""Import installed packages only: a file in the working directory must not stand in for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or site-packages
_OWN = {"benchmarks", "finetune", "scripts", "tests"}  # folders of a checkout that hold Python files


def leave_working_directory() -> None:
    """Take the working directory from the places to import from, here and in all that this process starts.

    `python -m`, DeepSpeed's launcher and an open end of PYTHONPATH put it there. What stands in it may be
    another person's: a `wandb.py` would be imported in place of the package that is not installed. A checkout
    of finetune stays, unless modules were added to it.
    """
    here = os.path.realpath(os.getcwd())
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if Path(here) != ROOT or _has_added_modules():
        sys.path[:] = [place for place in sys.path if os.path.realpath(place) != here]
        given = [place for place in given if os.path.realpath(place) != here]
    if not any(os.path.realpath(place) == str(ROOT) for place in sys.path):  # a checkout, not installed
        given.append(str(ROOT))
    os.environ |= {"PYTHONPATH": os.pathsep.join(given), "PYTHONSAFEPATH": "1"}


def _has_added_modules() -> bool:
    entries = [entry for entry in ROOT.iterdir() if entry.name not in _OWN and not entry.name.startswith(".")]
    return any(
        entry.suffix in (".py", ".so") or (entry.is_dir() and next(entry.glob("*.py"), None))
        for entry in entries
    )
