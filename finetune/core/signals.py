"""Signals that end a command at its next good place: the first is handed on, a second one ends it at once.

No torch here: a search, which only starts runs, listens too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from finetune.core.errors import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
TOGETHER = 1.0  # seconds in which a second signal is the first again: launchers pass on what all were sent
PR_SET_PDEATHSIG = 1  # of prctl, in <linux/prctl.h>


def end_with_parent() -> None:
    """Send this process SIGTERM when the process that started it ends, also by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def listening(heard: Callable[[str], None]) -> Iterator[None]:
    """Take signals in this process; not in those it forks, which end with it, nor outside the main thread.

    Args:
        heard: called with the name of the first one, where the program is just then; it may raise.
    """
    process, first = os.getpid(), 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if os.getpid() != process:
            return
        now = time.monotonic()
        if first and now - first > TOGETHER:
            os._exit(Exit.STOPPED)  # at once: what was published stays as it is
        if not first:
            first = now
            heard(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
