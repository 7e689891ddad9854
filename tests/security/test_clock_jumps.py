"""A clock that is set while finetune runs changes no decision about elapsed time."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import psutil
import pytest
from transformers import TrainerControl

from finetune.cli.arguments import until
from finetune.core.errors import UserError
from finetune.distributed import collectives, launch_environment
from finetune.experiments.runner import kept_runs, worker_process
from finetune.experiments.sweep import study_storage
from finetune.run_folder import lock
from finetune.training import stopping
from support.child_processes import Child

JUMPS = (-86_400.0, -600.0, 600.0, 86_400.0)  # seconds


@pytest.fixture(params=JUMPS)
def jump(request, monkeypatch) -> Any:
    """`jump()`: from here on the clock is so many seconds off."""
    original, seconds = time.time, request.param

    def jumps() -> float:
        monkeypatch.setattr(time, "time", lambda: original() + seconds)
        return seconds

    return jumps


def test_until_a_duration_is_not_moved_by_the_clock(jump) -> None:
    stop, over = stopping.Stop(until("1h")), stopping.Stop(until("0.001s"))
    jump()
    time.sleep(0.01)
    assert stop.due(1, 0.0) == "" and over.due(1, 0.0) == "--until 0.001s"
    assert stop.due(1, 3601.0) == "--until 1h", "a step and a checkpoint would take too long"


def test_until_a_time_of_day_follows_the_clock(jump) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 300))
    stop = stopping.Stop(until(at))
    assert stop.due(1, 0.0) == ""
    seconds = jump()
    assert bool(stop.due(1, 0.0)) == (seconds > 300)


def test_step_that_hangs_is_measured_without_the_clock(jump, monkeypatch) -> None:
    asked, left = list[float](), list[int]()
    monkeypatch.setattr(collectives, "given_up", lambda seconds: asked.append(seconds) or seconds > 100)
    monkeypatch.setattr(launch_environment, "report", lambda *_: None)
    monkeypatch.setattr(os, "_exit", left.append)
    stop: Any = stopping.Stop()
    stop.deferred = True
    schedule: Any = SimpleNamespace(stop=stop)
    stopping.Schedule.on_step_begin(schedule, None, None, TrainerControl())
    jump()
    stop.heard("SIGTERM")
    assert 0 <= asked[0] < 100 and not left
    stop.step_began -= 1000
    stop.heard("SIGTERM")
    assert asked[1] > 1000 and left


def test_trial_s_seconds_are_measured_without_the_clock(jump, tmp_path, monkeypatch) -> None:
    def start(*given: Any, cpu: bool) -> Any:
        jump()
        return Child([sys.executable, "-c", "import sys; sys.exit(5)"])

    (tmp_path / "log").touch()
    monkeypatch.setattr(worker_process, "start", start)
    trial = worker_process.Trial([], tmp_path, tmp_path / "log")
    ended = worker_process.run(trial, "eval_loss", lambda _: "", lambda: ("", ""))
    assert 0 <= ended.seconds < 60


@pytest.fixture
def study(monkeypatch) -> Any:
    monkeypatch.setattr(study_storage, "WATCHED", 0.2)
    return optuna.create_study()


def test_worker_of_this_machine_is_not_lost_when_the_clock_is_set(study, monkeypatch) -> None:
    trial = study.ask()
    study_storage.describe(trial)
    boot, born = psutil.boot_time(), psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot + 600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda own: born(own) + 600)
    assert study_storage.take_over(study) == []


@pytest.mark.parametrize("alive", [True, False])
def test_worker_of_another_machine_is_lost_only_if_it_is_silent(study, jump, alive: bool) -> None:
    trial, done = study.ask(), threading.Event()
    trial.set_user_attr("worker", "elsewhere 1 0.00")
    trial.set_user_attr("alive", time.time())
    assert study_storage.take_over(study) == [], "it has just said that it is alive"
    jump()

    def beat() -> None:
        while not done.wait(0.02):
            trial.set_user_attr("alive", time.time() - 9999)  # by the clock of its machine

    thread = threading.Thread(target=beat)
    if alive:
        thread.start()
    try:
        assert study_storage.take_over(study) == ([] if alive else [0])
    finally:
        done.set()
        if alive:
            thread.join()


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("seconds", JUMPS)
def test_lock_of_another_machine_is_free_only_if_it_is_not_touched(
    tmp_path, monkeypatch, alive: bool, seconds: float
) -> None:
    """On a disk without locks, whose clock or whose other machine's clock was set."""

    def refuses(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuses)
    monkeypatch.setattr(lock, "BEAT", 0.1)
    file, done, times = tmp_path / lock.LOCK, threading.Event(), iter(range(1, 1000))
    file.write_text("process 1 on elsewhere, since then\n")
    os.utime(file, (time.time() + seconds,) * 2)

    def beat() -> None:
        while not done.wait(0.05):
            os.utime(file, (time.time() + seconds + next(times),) * 2)

    thread = threading.Thread(target=beat)
    if alive:
        thread.start()
    try:
        if alive:
            with pytest.raises(UserError, match="another run uses this folder"), claim(tmp_path):
                pass
        else:
            with claim(tmp_path):
                assert str(os.getpid()) in file.read_text()
    finally:
        done.set()
        if alive:
            thread.join()


def claim(folder: Path) -> Any:
    return lock.claimed(str(folder), "run")


def test_runs_set_aside_after_the_clock_was_set_back_keep_their_names(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101-000000")
    names = []
    for number in range(3):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / f"{number}").touch()
        names.append(kept_runs.set_aside(tmp_path / "run").name)
    assert names == ["run-20260101-000000", "run-20260101-000000-2", "run-20260101-000000-3"]
    assert [path.name for path in sorted((tmp_path / "aside").glob("*/*"), key=lambda p: p.name)] == [*"012"]
