"""A run's folder is one run's: free when it starts, and its own until it ends."""

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
from pathlib import Path
from typing import IO, TYPE_CHECKING

from finetune.core import safe_files, standard_streams
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.paths import can_be_path, why_not_makeable

if TYPE_CHECKING:
    from collections.abc import Iterator

LOCK = ".lock"
HELD = (errno.EAGAIN, errno.EACCES)  # what is said of a lock that another process holds
BEAT, SILENT = 15.0, 60.0  # seconds between touches of a lock's file where a disk knows no locks; without one


def check_free(output_dir: str | None) -> None:
    """A folder that already holds something is left alone (exit 2)."""
    path = Path(output_dir or "")
    if not can_be_path(str(path)):
        raise UserError(Problem("not the name of a folder", "train.output_dir", found=str(path)[:200]))
    if output_dir is None or not path.exists() or (path.is_dir() and not _entries(path)):
        return
    held = ", ".join(_entries(path)[:6]) if path.is_dir() else "a file"
    fix = "a new name: train.output_dir=..., or none for a dated one; nothing was deleted"
    if (path / LOCK).is_file() and not (path / LOCK).is_symlink():
        held += _user(path / LOCK)
    if any(path.glob("checkpoints/step-*")):
        fix = f"--resume, to go on with it; or {fix}"
    raise UserError(Problem(f"{path} is not empty", "train.output_dir", found=held, fix=fix))


def _user(path: Path) -> str:
    """Whose a lock's file is, and whether that one goes on. Not to be asked by who holds it."""
    with path.open(encoding="utf-8") as file:
        held = file.read().strip()
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD or _alive(file, held, watch=False):
                return f"; in use by {held}"
    return f"; left by {held}, which is gone"


def dated(name: str) -> str:
    """A new folder for a run without one, made here: of two in the same second each has its own."""
    path = Path(f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    make(str(path.parent))
    for more in ("", *(f"-{number}" for number in range(2, 1000))):
        with contextlib.suppress(FileExistsError):
            Path(f"{path}{more}").mkdir()
            return f"{path}{more}"
    raise UserError(Problem(f"{path} and what follows exist", "train.output_dir", fix="a name of your own"))


def _entries(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)


@contextlib.contextmanager
def claimed(output_dir: str | None, name: str) -> Iterator[str | None]:
    """Keep a run folder from other runs on this or another machine for as long as this one lasts.

    The lock is the system's, so it ends with the process, however that ends; the file says whose it is. Where
    a network's disk knows no locks, the file is touched every BEAT seconds in its place. It is not to be
    opened meanwhile: the lock is POSIX's, which processes that were forked do not hold on to, and which ends
    when this one closes any handle of the file.

    Args:
        output_dir: the folder; `None`: a new one, called by `name` and the time.

    Yields:
        The folder; where rank 0 holds and names it, what was given.

    Raises:
        UserError: another run has it (exit 2).
    """
    if os.environ.get("RANK", "0") != "0":
        yield output_dir
        return
    made = output_dir is None or not Path(output_dir).exists()
    first = made and output_dir is None and not Path("runs").exists()
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
            if made and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()
                if first and not any(folder.parent.iterdir()):
                    folder.parent.rmdir()


def _locked(path: Path) -> tuple[IO[str], bool]:
    """The lock's file, of this name and not one that its holder deleted; whether the system holds it."""
    while True:
        try:
            file = safe_files.open_append(path.parent, path.name)
        except OSError as error:
            what = f"can't write in {path.parent}: {error.strerror}"
            raise UserError(Problem(what, "train.output_dir"), code=Exit.ENVIRONMENT) from None
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            held, unknown = file.read().strip(), error.errno not in HELD
            if unknown and not _alive(file, held):
                said = f"no locks on this file system ({error.strerror}): a file is touched instead"
                standard_streams.say(f"note: {path.parent}: {said}", error=True)
                return file, False
            file.close()
            what, fix = "another run is writing there", "a new train.output_dir, or wait for it"
            fix += f": it is over if {path} is not touched for {SILENT:.0f} s" if unknown else ""
            raise UserError(Problem(what, "train.output_dir", found=held, fix=fix)) from None
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file, True
        file.close()


def _alive(file: IO[str], held: str, *, watch: bool = True) -> bool:
    """Whether the run that a lock's file names goes on: by its process if here, else by the file's time.

    Args:
        watch: look whether the file is touched, where its time is old or in the future. The clock of a disk
            or machine may have been set since.
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
    """Whether another process touches a lock's file within the time of two beats."""
    seconds = 2 * BEAT
    said = f"finetune watches for {seconds:.0f} s whether another run touches it"
    standard_streams.say(f"note: {path}: {said}", error=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(BEAT / 4)
        with contextlib.suppress(OSError), path.open("rb") as again:  # NFS looks again when a file is opened
            if os.fstat(again.fileno()).st_mtime != before:
                return True
    return False


@contextlib.contextmanager
def _beating(path: Path) -> Iterator[None]:
    """A sign of life in a file's time, for as long as this lasts."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BEAT):
            with contextlib.suppress(OSError):  # a disk that is away for a while
                os.utime(path)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def check_makeable(path: str) -> None:
    """Refuse a folder that cannot be made, without making it (exit 3)."""
    if reason := why_not_makeable(Path(path)):
        problem = Problem(f"can't make {path}: {reason}", "train.output_dir")
        raise UserError(problem, code=Exit.ENVIRONMENT)


def make(path: str) -> None:
    """Make the folder (exit 3 if that can't be)."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = Problem(f"can't make {path}: {error.strerror}", "train.output_dir")
        raise UserError(problem, code=Exit.ENVIRONMENT) from None
