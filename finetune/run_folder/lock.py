"""Keep each run folder for one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from finetune.core import safe_files, standard_streams
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.formatting import listed
from finetune.core.paths import can_be_path, free_name, why_not_makeable
from finetune.distributed import launch_environment

LOCK = ".lock"
HELD = (errno.EAGAIN, errno.EACCES)  # errors of a lock that another process holds
# On a file system without locks: seconds between updates of the file's time, and seconds after which a run
# without updates has ended
BEAT, SILENT = 15.0, 60.0


def check_free(output_dir: str | None) -> None:
    """Raise a UserError if the folder is not empty (exit 2)."""
    path = Path(output_dir or "")
    if not can_be_path(str(path)):
        raise UserError(
            Problem(
                "this name can't be a folder name",
                "train.output_dir",
                found=str(path)[:200],
                fix="train.output_dir: runs/my-run",
                why="it is too long, has a NUL character, or is a link to itself",
                code="path",
            )
        )
    if output_dir is None or not path.exists() or (path.is_dir() and not _entries(path)):
        return
    held = listed(_entries(path)) if path.is_dir() else "a file"
    fix = f"train.output_dir: {free_name(path)}, or remove the key to get a folder with the date in its name"
    if (path / LOCK).is_file() and not (path / LOCK).is_symlink():
        held += _user(path / LOCK)
    if any(path.glob("checkpoints/step-*")):
        fix = f"add --resume to continue this run, or {fix}"
    raise UserError(
        Problem(
            f"the run folder {path} is not empty",
            "train.output_dir",
            found=held,
            fix=fix,
            why="finetune overwrites no files",
            code="run-folder",
        )
    )


def _user(path: Path) -> str:
    """Return the lock's owner and whether that process is alive. The owner itself must not call this."""
    with path.open(encoding="utf-8") as file:
        held = file.read().strip()
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD or _alive(file, held, watch=False):
                return f"; in use by {held}"
    return f"; its lock is from {held}, which has ended"


def dated(name: str) -> str:
    """Create a folder with the date in its name. Two runs that start in the same second get two folders."""
    path = Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    make(str(path.parent))
    for more in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            Path(f"{path}{more}").mkdir()
            return f"{path}{more}"
    raise UserError(
        Problem(
            f"{path} and 998 more folders with this name exist",
            "train.output_dir",
            fix="train.output_dir=runs/my-run",
            code="run-folder",
        )
    )


def _entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)


@contextlib.contextmanager
def claimed(output_dir: str | None, name: str) -> Iterator[str | None]:
    """Lock a run folder against other runs on this or another machine while this run lasts.

    It is a POSIX lock of the operating system, so it ends with the process. The file names its owner. If a
    network file system has no locks, a thread updates the file's time every BEAT seconds.

    Don't open the file during the run. Closing any handle of the file ends the lock, and forked processes do
    not inherit it.

    Args:
        output_dir: the folder. `None` creates a folder from `name` and the time.

    Yields:
        The folder. Only rank 0 locks and names it, so other ranks get `output_dir`.

    Raises:
        UserError: another run uses the folder (exit 2).
    """
    if not launch_environment.is_main():
        yield output_dir
        return
    creates_folder = output_dir is None or not Path(output_dir).exists()
    creates_runs = creates_folder and output_dir is None and not Path("runs").exists()
    folder = Path(output_dir or dated(name))
    make(str(folder))
    path = folder / LOCK
    file, locked = _locked(path)
    with file, contextlib.nullcontext() if locked else _beating(path):
        file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {platform.node()}, since {since}\n")
        file.flush()
        try:
            yield str(folder)
        finally:
            path.unlink(missing_ok=True)
            if creates_folder and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
                if creates_runs and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()


def _locked(path: Path) -> tuple[IO[str], bool]:
    """Open the lock's file, and return whether the system holds the lock.

    If the owner deleted the file in between, open it again.
    """
    while True:
        try:
            file = safe_files.open_append(path.parent, path.name)
        except OSError as error:
            raise UserError(
                Problem(
                    f"finetune can't write to {path.parent}",
                    "train.output_dir",
                    found=str(error.strerror),
                    fix=f"train.output_dir: runs/{path.parent.name}",
                    code="path",
                ),
                code=Exit.ENVIRONMENT,
            ) from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            held, unknown = file.read().strip(), error.errno not in HELD
            if unknown and not _alive(file, held):
                said = f"the file system has no locks ({error.strerror}), so finetune updates a file's time"
                standard_streams.say(f"note: {path.parent}: {said}", error=True)
                return file, False
            file.close()
            raise UserError(
                Problem(
                    "another run uses this folder",
                    "train.output_dir",
                    found=held,
                    fix=f"train.output_dir: {free_name(path.parent)}, or wait for that run",
                    why=f"a run has ended if the time of {path} is older than {SILENT:.0f} s"
                    if unknown
                    else "",
                    code="run-folder",
                )
            ) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, True
        file.close()


def _alive(file: IO[str], held: str, *, watch: bool = True) -> bool:
    """Return whether the run that a lock's file names is alive.

    A process of this machine is looked up. For another machine, the time of the file decides.

    Args:
        watch: wait for an update of the file if its time is old or in the future. The clock of a disk or
            machine may have changed.
    """
    named = re.match(r"process (\d+) on (\S+),", held)
    import psutil

    if not named or (named[2] == platform.node() and not psutil.pid_exists(int(named[1]))):
        return False
    path, touched = Path(file.name), os.fstat(file.fileno()).st_mtime
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=LOCK, suffix=".tmp") as now:  # the disk's clock
        age = os.fstat(now.fileno()).st_mtime - touched
    return abs(age) < SILENT or (watch and _is_touched(path, touched))


def _is_touched(path: Path, before: float) -> bool:
    """Return whether another process updates a lock's file within the time of two beats."""
    seconds = 2 * BEAT
    said = f"finetune waits {seconds:.0f} s to see if another run updates this file"
    standard_streams.say(f"note: {path}: {said}", error=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT / 4)
        with contextlib.suppress(OSError), path.open("rb") as again:  # NFS updates the time at an open
            if os.fstat(again.fileno()).st_mtime != before:
                return True
    return False


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """Update the time of a file until the context ends."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            with contextlib.suppress(OSError):  # the disk may be unavailable for a while
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_makeable(path: str) -> None:
    """Raise a UserError if the folder can't be created, without creating it (exit 3)."""
    if reason := why_not_makeable(Path(path)):
        raise UserError(_not_makeable(path, reason), code=Exit.ENVIRONMENT)


def make(path: str) -> None:
    """Create the folder (exit 3 if that fails)."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_not_makeable(path, str(error.strerror)), code=Exit.ENVIRONMENT) from None


def _not_makeable(path: str, reason: str) -> Problem:
    return Problem(
        f"finetune can't create the folder {path}",
        "train.output_dir",
        found=reason,
        fix=f"train.output_dir: runs/{Path(path).name or 'my'}",
        code="path",
    )
