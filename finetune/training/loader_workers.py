"""End a run with a hanging data loader worker, and print the worker's stack."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import psutil

from finetune.core import signals, standard_streams
from finetune.core.errors import Exit, Problem, UserError, first_line

TIMED_OUT = "DataLoader timed out after"  # torch's message (2.13, torch/utils/data/dataloader.py)
ENDED = "DataLoader worker (pid"
LATER = 2  # seconds after torch's own limit
ASK = signal.SIGUSR2  # makes a worker write its stack to stderr
_stopped: list[Any] = []  # handlers of SIGCHLD that `stop_handler` replaced
ANSWER_SECONDS = 0.5  # time for one worker to write its stack


def answer_signal() -> None:
    """Make this worker write its stack to stderr on a signal, also while it hangs in a library."""
    if sys.__stderr__:
        faulthandler.register(ASK, file=sys.__stderr__, all_threads=False)


def timed_out(error: BaseException) -> bool:
    """Return whether an error is the timeout of a data loader."""
    return isinstance(error, RuntimeError) and str(error).startswith(TIMED_OUT)


def end(seconds: int) -> UserError:
    """Write each worker's stack to stderr, kill the workers, and return the error for the user.

    A hanging worker ignores SIGTERM, and Python would wait for it forever.

    Args:
        seconds: how long the run waited.
    """
    workers = []
    for worker in multiprocessing.active_children():
        if not worker.daemon or worker.pid is None:
            continue
        with suppress(psutil.NoSuchProcess):
            workers.append(f"worker process {worker.pid} ({psutil.Process(worker.pid).status()})")
            standard_streams.say(f"data loader {workers[-1]} is at:", error=True)
            os.kill(worker.pid, ASK)
            time.sleep(ANSWER_SECONDS)
        worker.kill()
        worker.join()
    return UserError(
        Problem(
            f"a data loader worker hangs: it returned no batch within {seconds} s",
            "train.dataloader_timeout",
            found=f"{', '.join(workers) or 'no worker is left'}; the stack of each worker is printed above",
            fix="resume with --resume; if reading is slow, set a larger `train.dataloader_timeout`",
            code="launch-lost",
        ),
        code=Exit.TRAINING,
    )


class Watched:
    """Iterate over batches, and end workers that hang while they hand one over.

    Workers send tensors as handles. This process takes a handle from the queue within torch's time limit, and
    then waits without a limit for a thread of the worker. If the worker ends, this process gets an error.

    The first batch has no limit here, because a resumed run skips the earlier ones before it.
    """

    begun = hangs = False
    error: UserError | None = None

    def __init__(self, batches: Iterator[Any], seconds: int) -> None:
        self.batches, self.seconds = batches, seconds

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        timer = threading.Timer(self.seconds + LATER, self._end)
        timer.daemon = True
        if self.begun:
            timer.start()
        self.begun = True
        try:
            return next(self.batches)
        except Exception as error:  # any error, of torch or of the pipe to a worker that ended
            if self.hangs:
                stop_handler()
                timer.join()
                assert self.error
                raise self.error from None
            if isinstance(error, ConnectionError | EOFError) and not str(error).startswith("Caught"):
                raise _ended(error) from error
            raise
        finally:
            timer.cancel()

    def _end(self) -> None:
        self.hangs = True
        self.error = end(self.seconds)


def ended(error: BaseException) -> UserError | None:
    """Return the error for the user if a worker ended, such as by the kernel when the memory is full."""
    return _ended(error) if isinstance(error, RuntimeError) and str(error).startswith(ENDED) else None


def _ended(error: BaseException) -> UserError:
    return UserError(
        Problem(
            "a data loader worker ended",
            "train.dataloader_num_workers",
            found=first_line(error) or type(error).__name__,
            fix="resume with --resume; if the memory was full, set fewer workers",
            why="the kernel ends a process with the signal Killed if the memory is full",
            code="launch-lost",
        ),
        code=Exit.TRAINING,
    )


def stop_handler() -> None:
    """Stop torch's handler of SIGCHLD after an error.

    It raises an error in any line when any process ends, as long as Python holds the loader of a lost worker.
    """
    if threading.current_thread() is threading.main_thread():  # no other thread handles signals
        _stopped.append(signal.signal(signal.SIGCHLD, signal.SIG_DFL))


def restore_handler() -> None:
    """Install the handler again, for the loader of the next training in this process."""
    while _stopped and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, _stopped.pop())


def keep_workers(prepare: Callable[[int], None] | None) -> Any:
    """Return a worker start function that ignores signals to the process group, because the run still reads.

    The workers end when this process ends: Python sends them SIGTERM and waits until they are gone.
    """
    over = multiprocessing.RawValue("b")
    atexit.register(setattr, over, "value", 1)
    return partial(_kept_worker, over, prepare)


def _kept_worker(over: Synchronized[bytes], prepare: Callable[[int], None] | None, worker: int) -> None:
    for number in signals.ENDING:
        signal.signal(number, lambda *_: os._exit(0) if over.value else None)
    answer_signal()
    if prepare:
        prepare(worker)
