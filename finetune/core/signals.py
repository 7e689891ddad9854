"""Stop a command on a signal: the first signal stops it at the next safe point, a second one at once.

This module imports no torch, because a sweep, which only starts runs, uses it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from finetune.core.errors import Exit

Result = TypeVar("Result")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# Seconds in which a second signal counts as the first one. Launchers send a signal on to processes that have
# received it already.
TOGETHER = 1.0
PR_SET_PDEATHSIG = 1  # an option of prctl, from <linux/prctl.h>


def end_with_parent() -> None:
    """Send this process SIGTERM when its parent process ends for any reason, even by SIGKILL. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def in_new_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a new process, and return its result or raise its exception.

    Ctrl-C ends the process without a traceback, also while it imports the function's module.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_end_at_interrupt) as pool:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            called = pool.submit(function, *arguments)  # the new process starts with the signal blocked
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return called.result()


def _end_at_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def listening(heard: Callable[[str], None]) -> Iterator[None]:
    """Handle signals in this process. Do nothing outside of the main thread.

    Forked processes do not handle signals: they end with this process.

    Args:
        heard: called with the name of the first signal, in the middle of the running code. It may raise.
    """
    process, first = os.getpid(), 0.0

    def handle(number: int, frame: object) -> None:
        nonlocal first
        if os.getpid() != process:
            return
        now = time.monotonic()
        if first and now - first > TOGETHER:
            os._exit(Exit.STOPPED)  # at once; published checkpoints stay valid
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
