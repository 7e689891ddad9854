"""A run folder is one run's: its lock, also where the disk knows none, and folders of runs that end early."""

import contextlib
import errno
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.experiments.sweep import study
from finetune.run_folder import lock
from support.paths import QUICKSTART


@contextlib.contextmanager
def another_process_in(folder: Path) -> Iterator[int]:
    """A process that has the folder until it is killed here."""
    held, told = os.pipe()
    child = os.fork()
    if not child:
        with lock.claimed(str(folder), folder.name):
            os.write(told, b"1")
            signal.pause()
    os.read(held, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_run_folder_is_one_run_s(tmp_path) -> None:
    """Another process gets the holder's name; when that is gone, however it went, the folder is free."""
    with another_process_in(tmp_path / "run") as child:
        with (
            pytest.raises(UserError, match=f"process {child} on") as raised,
            lock.claimed(str(tmp_path / "run"), "run"),
        ):
            pass
        assert raised.value.code == 2
        with (
            pytest.raises(UserError, match=r"in use by|another run"),
            lock.claimed(str(tmp_path / "run"), "run"),
        ):
            pass
    with lock.claimed(str(tmp_path / "run"), "run"):
        lock.check_free(str(tmp_path / "run"))
    assert not (tmp_path / "run" / lock.LOCK).exists()


def test_a_final_run_of_an_earlier_best_recipe_is_set_aside(tmp_path, capsys) -> None:
    """It would be another training than the one that is there."""
    best, run = tmp_path / "best.yaml", tmp_path / "final"
    text = QUICKSTART.read_text()
    best.write_text(text)
    study.make_way(tmp_path, Console())
    other = text.replace("r: ", "r: 1")
    for written, kept in ((text, True), (f"# trial 1 of 3\n{text}", True), (other, False)):
        run.mkdir(exist_ok=True)
        best.write_text(written)
        if not kept:
            with another_process_in(run), pytest.raises(UserError, match="another worker trains the final"):
                study.make_way(tmp_path, Console())
        study.make_way(tmp_path, Console())
        assert run.exists() == kept
    assert (tmp_path / "final.yaml").read_text() == best.read_text()
    (moved,) = (tmp_path / "aside").iterdir()
    assert f"earlier best recipe; finetune moved it to {moved}" in capsys.readouterr().out.replace("\n", "")


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *given: "20260101-000000")
    with lock.claimed(None, "a") as one, lock.claimed(None, "a") as other:
        assert (one, other) == ("runs/a-20260101-000000", "runs/a-20260101-000000-2")
        assert all((Path(str(path)) / lock.LOCK).exists() for path in (one, other))
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_locks_is_no_other_run(tmp_path, monkeypatch, capsys) -> None:
    def refuses(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuses)
    monkeypatch.setattr(lock, "BEAT", 0.02)
    file = tmp_path / "run" / lock.LOCK
    with lock.claimed(str(tmp_path / "run"), "run") as path:
        assert path == str(tmp_path / "run")
        os.utime(file, (0, 0))
        end = time.monotonic() + 30
        while file.stat().st_mtime == 0 and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(UserError, match="another run uses this folder"), lock.claimed(path, "run"):
            pass
    assert "the file system has no locks (No locks available)" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize(
    ("held", "ago", "free"),
    [
        ("process 1 on elsewhere, since then\n", 0, False),
        ("process 1 on elsewhere, since then\n", 100, True),
        ("process 1 on elsewhere, since then\n", -3600, True),  # the clock was set back after a kill
        (f"process {2**22 + 1} on {platform.node()}, since then\n", 0, True),  # more than there can be
        ("", 0, True),
    ],
)
def test_a_lock_s_file_that_is_not_touched_is_nobody_s(held, ago, free, tmp_path, monkeypatch) -> None:
    """Where the disk knows no locks: after a kill -9 this machine goes on at once, another a minute later."""

    def refuses(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", refuses)
    monkeypatch.setattr(lock, "BEAT", 0.02)
    file = tmp_path / lock.LOCK
    file.write_text(held)
    os.utime(file, (time.time() - ago,) * 2)
    said = contextlib.nullcontext() if free else pytest.raises(UserError, match="is older than 60 s")
    with said, lock.claimed(str(tmp_path), "run"):
        assert str(os.getpid()) in file.read_text()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lock_that_its_holder_deletes_is_not_taken_for_one(tmp_path, monkeypatch) -> None:
    """Between the opening and the locking of a file another run ends, and deletes it."""
    original, seen = lock.fcntl.lockf, []

    def lockf(file: Any, how: int) -> None:
        original(file, how)
        if not seen:
            os.unlink(file.name)
        seen.append(1)

    monkeypatch.setattr(lock.fcntl, "lockf", lockf)
    with lock.claimed(str(tmp_path / "run"), "run"):
        assert len(seen) == 2 and str(os.getpid()) in (tmp_path / "run" / lock.LOCK).read_text()


def test_a_run_that_is_refused_leaves_no_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError), lock.claimed(None, "run") as folder:
        assert folder and (tmp_path / folder).is_dir()
        raise UserError(Problem("refused"))
    assert not list(tmp_path.iterdir())
