"""Ctrl-C: the message and the exit code of a command that it ended.

This module imports only small modules, because `finetune.__main__` uses it before all others are imported.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

from finetune.cli import json_output
from finetune.core import standard_streams
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

CODE = 130  # of the process
MESSAGE = "interrupted before it was done"
_heard = list[int]()


def note() -> None:
    """Remember each Ctrl-C of this process, besides raising KeyboardInterrupt as Python does.

    torch loses the exception while it imports numpy, and a later import of numpy fails with another one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _noted)


def _noted(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    signal.default_int_handler(number, frame)


def heard() -> bool:
    """Return whether Ctrl-C was pressed since `note`."""
    return bool(_heard)


def before_the_command(words: Sequence[str]) -> int:
    """Print the message, and with `--json` the object, for a command line that was not parsed yet."""
    standard_streams.say(MESSAGE, error=True)
    if "--json" in words and launch_environment.is_main():
        with contextlib.suppress(OSError):
            standard_streams.say(json_output.render(" ".join(words[:1]), CODE, None, ()))
    return CODE
