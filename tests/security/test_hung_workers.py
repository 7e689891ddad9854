"""A data loader worker that hangs ends the run with an error in time, and is not waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.utils.data

from finetune.speed import chunked_cross_entropy
from finetune.training import loader_workers
from support.runs import run_checks

SECONDS = 2  # train.dataloader_timeout
GIVEN = ["train.max_steps=40", "eval.samples=0", "eval.generate=false", "adapter.r=2", "data.validation=null"]
GIVEN += ["train.dataloader_num_workers=2", f"train.dataloader_timeout={SECONDS}"]


def hang_in_collator(*given: Any) -> Any:
    """The collator in a worker that never comes back, such as one that waits for a lock."""
    if torch.utils.data.get_worker_info() is not None:
        threading.Event().wait()


def stop_workers(done: threading.Event) -> None:
    """SIGSTOP to the first worker that appears: the kernel runs no line of its Python any more."""
    while not done.wait(0.01):
        workers = [one for one in multiprocessing.active_children() if one.daemon and one.pid]
        if workers:
            os.kill(workers[0].pid or 0, signal.SIGSTOP)
            return


@pytest.mark.parametrize("persists", ["true", "false"])
@pytest.mark.parametrize("how", ["sleeps", "stopped"])
def test_worker_that_hangs_ends_the_run_in_time(train, capfd, monkeypatch, how: str, persists: str) -> None:
    done = threading.Event()
    if how == "sleeps":
        monkeypatch.setattr(chunked_cross_entropy, "counted", hang_in_collator)
    thread = threading.Thread(target=stop_workers, args=(done,))
    if how == "stopped":
        thread.start()
    began = time.monotonic()
    try:
        train(*GIVEN, f"train.dataloader_persistent_workers={persists}", code=5)
    finally:
        done.set()
        if how == "stopped":
            thread.join()
    assert time.monotonic() - began < SECONDS + 20, "torch waits 20 s more for workers that hang"
    said = capfd.readouterr().err
    assert f"a data loader worker hangs: it returned no batch within {SECONDS} s" in said
    assert "train.dataloader_timeout" in said and "Traceback" not in said
    assert ("hang_in_collator" if how == "sleeps" else "(stopped)") in said
    assert not [one for one in multiprocessing.active_children() if one.daemon]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, f"a data loader worker hangs: it returned no batch within {SECONDS} s"),
        (signal.SIGKILL, "a data loader worker ended"),
    ],
)
def test_worker_that_stops_after_some_batches_ends_the_run(
    train, capfd, monkeypatch, number, said: str
) -> None:
    """It has announced the next batches, and this process asks it for their memory."""
    begun, original = list[float](), loader_workers.Watched.__next__

    def stop_in_fifth(self: loader_workers.Watched) -> object:
        begun.append(time.monotonic())
        if len(begun) == 5:
            time.sleep(0.5)  # the worker has put further batches into its queue
            for worker in multiprocessing.active_children():
                if worker.daemon:
                    os.kill(worker.pid or 0, number)
        return original(self)

    monkeypatch.setattr(loader_workers.Watched, "__next__", stop_in_fifth)
    train(*GIVEN, code=5)
    assert time.monotonic() - begun[4] < SECONDS + 20
    shown = capfd.readouterr().err
    assert said in shown and "resume with --resume" in shown and "library-error" not in shown
    assert not [one for one in multiprocessing.active_children() if one.daemon]


def test_worker_in_time_leaves_a_run_check(train) -> None:
    run = train("train.dataloader_num_workers=1", "eval.samples=0", "eval.generate=false")
    assert run_checks(run)["train.dataloader_timeout"]["actual"] == "600 s"
