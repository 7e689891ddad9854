"""The errors for users, their messages and the exit codes.

error: model.attention: `flash_attention_3` is not available on this machine (my.yaml:4:3) [attention-kernel]
     4 |   attention: flash_attention_3
       |   ^
  found:     an NVIDIA L4, compute capability 8.9
  expected:  compute capability 9.0
  why:       the kernel uses instructions of the Hopper generation
  help:      attention: auto

`finetune explain attention-kernel` describes the kind of problem in brackets. `error_codes.py`
lists all kinds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from enum import IntEnum
from io import IOBase
from pathlib import Path
from typing import NamedTuple

from finetune.core.privacy import masked, secrets
from finetune.core.visible_text import visible

_LABELLED = re.compile(r"  (found|expected|why|help): +(.*)")
_CODED = re.compile(r"(.*) \[([a-z-]+)\]")
_PLACE = re.compile(r"(.+):(\d+):(\d+)")
MOST_PROBLEMS = 100  # in one error

LONGEST_LINE = 120  # characters of the recipe's line in an error

LONGEST_NAME = 200  # characters of a name in `nearest`
MOST_COMPARED = 1000  # names in `nearest`
SIMILAR = 0.6  # difflib's ratio of a name in `nearest`
LONGEST_TEXT = 2000  # characters of a text of an error

# errno values of an OSError: the path that a user named cannot be opened
UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errno values of an OSError: the disk is full
# errno values of an OSError: the disk or the network drive has failed
FAILED = (
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EREMOTEIO,
    errno.EUCLEAN,
    errno.EBADMSG,
    errno.ENODEV,
)
TOO_MANY = (errno.EMFILE, errno.ENFILE)  # errno values of an OSError: too many files are open
# Texts of Python and of Rust's rayon at a limit of processes and threads, which have no type for it
NO_THREAD = re.compile("can't start new thread|ThreadPoolBuildError")
RUST_ERRNO = re.compile(r"\(os error (\d+)\)")  # in the message of a library in Rust, such as safetensors
OUT_OF_MEMORY = (
    "close other programs, use a smaller model, or use a machine with more memory; `free -h` shows it"
)
# Texts of torch, which has no type for a lack of memory
NO_MEMORY = re.compile("DefaultCPUAllocator: can't allocate memory|Cannot allocate memory")
SHARED_MEMORY = re.compile(r"shared memory\(shm\)|torch_shm")  # texts of torch for /dev/shm


class Exit(IntEnum):
    """The exit status of the process."""

    DONE = 0
    INPUT = 2  # the user's input: recipe, data, command line
    ENVIRONMENT = 3  # a package, the hardware, the network, credentials
    ARTIFACT = 4  # a checkpoint or saved adapter that does not verify
    TRAINING = 5  # NaN or Inf, out of memory at the smallest batch, a failed run check
    STOPPED = 75  # stopped by a signal, resumable

    @classmethod
    def of(cls, code: int) -> Exit:
        """Return the status of a process that ended with `code`; TRAINING for other codes."""
        return cls(code) if code in list(cls) else cls.TRAINING


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    what: str
    key: str = ""
    """Dotted recipe key, such as `adapter.r`. The command line adds its place in the file."""
    where: str = ""
    found: str = ""
    expected: str = ""
    fix: str = ""
    more: str = ""
    """Further lines of `found`, from a table or a log."""
    why: str = ""
    code: str = ""
    """The kind of problem, a key of `error_codes.CODES`."""
    line: str = ""
    """The line of the file at `where`; the command line fills it in."""

    def __str__(self) -> str:
        indices = re.match(r"(\d+\.)*", self.key[::-1])  # of an item in a list, read from the end
        key = self.key[: len(self.key) - indices.end()] if indices else self.key
        head = f"error: {key}: {self.what}" if key else f"error: {self.what}"
        head = f"{head} ({self.where})" if self.where else head
        lines = [f"{head} [{self.code}]" if self.code else head, *self._source()]
        texts = [
            ("found:", self.found),
            *(("", line) for line in self.more.split("\n")),
            ("expected:", self.expected),
            ("why:", self.why),
            ("help:", self.fix),
        ]
        known = secrets()
        lines += [f"  {label:<10} {_cut(masked(text, known))}" for label, text in texts if text]
        return "\n".join(visible(masked(line, known)) for line in lines)

    def _source(self) -> list[str]:
        """Return the line of the file, and a line with a caret under the position."""
        place = _PLACE.fullmatch(self.where)
        if not place or not self.line or not 0 < int(place[3]) <= LONGEST_LINE:
            return []
        return [f"{place[2]:>6} | {self.line[:LONGEST_LINE]}", f"{'':>6} | {'':>{int(place[3]) - 1}}^"]


def _cut(text: str) -> str:
    left = len(text) - LONGEST_TEXT
    return f"{text[:LONGEST_TEXT]} ... and {left:,} more characters" if left > 0 else text


class UserError(Exception):
    """All problems found at one point, raised together, in the order of `by_line`."""

    def __init__(self, *said: Problem | str, code: Exit = Exit.INPUT) -> None:
        parsed = [_printed(p) if isinstance(p, str) else p for p in said]
        problems = tuple(by_line(parsed)[:MOST_PROBLEMS])
        if more := len(said) - len(problems):
            last, what = problems[-1], f"{more:,} more problems are not shown"
            problems += (Problem(what, last.key, last.where, code=last.code),)
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
        self.code = code


def raise_if_any(problems: Iterable[Problem | None], code: Exit = Exit.INPUT) -> None:
    """Raise a UserError with all problems, if there are any. `None` is no problem."""
    if found := [problem for problem in problems if problem]:
        raise UserError(*found, code=code)


def by_line(problems: Sequence[Problem]) -> list[Problem]:
    """Order problems by file and line. Files keep their order, and problems without a line come last."""
    places = [_PLACE.fullmatch(problem.where) for problem in problems]
    files = list(dict.fromkeys(place[1] for place in places if place))

    def position(index: int) -> tuple[int, int, int]:
        place = places[index]
        return (files.index(place[1]), int(place[2]), int(place[3])) if place else (len(files), 0, 0)

    return [problems[index] for index in sorted(range(len(problems)), key=position)]


def _printed(text: str) -> Problem:
    """Return the problem printed at the end of a text. torch repeats errors of loader workers as text."""
    what, *lines = text.rpartition("UserError: error: ")[2].strip().split("\n")
    labels = {match[1]: match[2] for line in lines if (match := _LABELLED.fullmatch(line))}
    shown = (labels.get(label, "") for label in ("found", "expected", "help"))
    coded = _CODED.fullmatch(what)
    what, code = (coded[1], coded[2]) if coded else (what, "")
    return Problem(what, "", "", *shown, why=labels.get("why", ""), code=code)


def first_line(error: BaseException | str) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def in_one_line(error: UserError, *, with_found: bool = False) -> str:
    """Return all problems of an error in one line, each with key and message. `with_found` adds `found`."""
    parts = ((p.key, p.what, p.found if with_found else "") for p in error.problems)
    return "; ".join(": ".join(filter(None, part)) for part in parts)


class Stage(NamedTuple):
    """What finetune was doing when another library raised an exception."""

    doing: str
    """The end of the sentence "while finetune ...", such as "loaded the tokenizer"."""
    key: str = ""
    fix: str = ""
    code: Exit = Exit.ENVIRONMENT


class Panic(RuntimeError):
    """A library in Rust, such as tokenizers, panicked."""


@contextlib.contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise the panic of a library in Rust as `Panic`, because its own type is not an `Exception`."""
    try:
        yield
    except BaseException as error:  # a panic is not an Exception; other errors are raised again
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(str(error)).with_traceback(error.__traceback__) from error


@contextlib.contextmanager
def stage(doing: str, key: str = "", fix: str = "", code: Exit = Exit.ENVIRONMENT) -> Iterator[None]:
    """Store on an exception of another library what finetune was doing. `unexpected` prints it.

    The exception itself does not change, so callers can still detect out of memory and lost processes.
    """
    try:
        with panics_as_errors():
            yield
    except UserError:
        raise
    except Exception as error:  # from any library; it is raised again
        vars(error).setdefault("finetune_stage", Stage(doing, key, fix, code))
        raise


def unexpected(error: Exception, doing: str, *, command: bool = True) -> UserError:
    """Return an unexpected exception as an error for users, with its library, place and stage.

    Args:
        doing: `Stage.doing`, used if no stage is stored on the exception.
        command: Whether a command can run again with `--debug`. Otherwise it is a call of the Python API,
            whose caller sees the cause, and may have passed the code that raised the exception.
    """
    at = vars(error).get("finetune_stage") or Stage(doing)
    library, file, line = _raised_in(error, passed_code=not command)
    library = "a library" if isinstance(error, Panic) else library
    what, kind = f"{library} failed while finetune {at.doing}", "library-error"
    trace = "run the command again with --debug to see the traceback" if command else ""
    read = _variables_of(library) if _raised_at_import(error) else []
    cause = f"correct or unset {', '.join(read)}, which {library} reads when it is imported" if read else ""
    fix = "; ".join(filter(None, [cause, at.fix, trace]))
    if library == YOURS:
        kind, fix = "your-code", "correct the code, or remove it from the call"
    if library == "finetune":
        what, kind = f"finetune failed while it {at.doing}", "internal-error"
        again = "run the command again with --debug, and " if command else ""
        fix = f"{again}report this bug of finetune with the traceback"
    return UserError(
        Problem(
            what,
            at.key,
            where=f"{file}:{line}",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}",
            fix=fix,
            code=kind,
        ),
        code=at.code,
    )


def explain(error: Exception, doing: str, *, command: bool = True) -> UserError:
    """Return an exception as an error for users: no memory, a bad path, a full disk, or `unexpected`.

    The arguments are those of `unexpected`.
    """
    lacks_memory = isinstance(error, RuntimeError | OSError) and NO_MEMORY.search(str(error))
    if isinstance(error, MemoryError) or lacks_memory:
        at = vars(error).get("finetune_stage") or Stage(doing)
        return UserError(
            Problem(
                f"the memory was full while finetune {at.doing}",
                at.key,
                found=" ".join(str(error).split())[:LONGEST],
                fix=OUT_OF_MEMORY,
                code="out-of-memory",
            ),
            code=at.code,
        )
    if isinstance(error, OSError) and error.errno in UNUSABLE and error.filename:
        return UserError(
            Problem(
                "finetune can't open this path",
                getattr(vars(error).get("finetune_stage"), "key", ""),
                where=str(error.filename)[:LONGEST_NAME],
                found=os.strerror(error.errno),
                fix="correct the path, or its permissions",
                code="path",
            )
        )
    if limit := _system_limit(error):
        return UserError(replace(limit, found=" ".join(str(error).split())[:LONGEST]), code=Exit.ENVIRONMENT)
    number, where = (error.errno, error.filename) if isinstance(error, OSError) else (_rust_errno(error), "")
    if number in TOO_MANY:
        return UserError(
            Problem(
                "too many files are open",
                where=str(where or "")[:LONGEST_NAME],
                found=os.strerror(number),
                fix="ulimit -n 4096, and run the command again",
                code="path",
            ),
            code=Exit.ENVIRONMENT,
        )
    if number in FAILED:
        return UserError(
            Problem(
                "the disk or the network drive failed",
                where=str(where or _open_file(error))[:LONGEST_NAME],
                found=os.strerror(number),
                fix="check the drive (`dmesg` shows its errors), restore the file, and run the command again",
                code="disk",
            ),
            code=Exit.ENVIRONMENT,
        )
    if number not in FULL:
        return _changed_file(error, doing) or unexpected(error, doing, command=command)
    return UserError(
        Problem(
            "the disk is full",
            where=str(where or ""),
            found=os.strerror(number),
            fix="free some space and run the command again; `finetune train --resume=auto` continues a run",
            code="disk",
        ),
        code=Exit.ENVIRONMENT,
    )


def _open_file(error: Exception) -> str:
    """Return the file that finetune was using when an error without a path was raised, if any."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _library_of(frame.f_code.co_filename)[0] == "finetune":
            names = (
                getattr(value, "name", value)
                for value in frame.f_locals.values()
                if isinstance(value, IOBase)
            )
            paths = (
                value for value in frame.f_locals.values() if isinstance(value, Path) and value.is_file()
            )
            if found := next((str(one) for one in (*names, *paths) if isinstance(one, str | Path)), ""):
                return found
    return ""


def _system_limit(error: Exception) -> Problem | None:
    """Return the problem if a limit of the system stopped a process, a socket or shared memory."""
    if is_process_limit(error):
        fix = "raise the limit (`ulimit -u`, `ulimit -v`, or the limit of processes of the container)"
        return Problem("the system starts no more processes or threads", fix=fix, code="process-limit")
    if isinstance(error, OSError) and "AF_UNIX path too long" in str(error):
        what = "the name of the folder for temporary files is too long for a socket"
        return Problem(what, where=tempfile.gettempdir(), fix="export TMPDIR=/tmp", code="path")
    in_semaphore = isinstance(error, OSError) and error.errno == errno.EROFS and not error.filename
    if in_semaphore or (isinstance(error, RuntimeError) and SHARED_MEMORY.search(str(error))):
        what = "the shared memory (/dev/shm) is full, or finetune can't write to it"
        return Problem(what, fix="make it larger (`docker run --shm-size=8g`), or writable", code="disk")
    return None


def is_process_limit(error: Exception) -> bool:
    """Return whether the system refused a new process or thread."""
    at_fork = isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN and not error.filename
    return at_fork or bool(NO_THREAD.search(str(error)))


def _changed_file(error: Exception, doing: str) -> UserError | None:
    """Return the error for a file that was deleted, replaced or damaged while finetune used it, or `None`.

    Args:
        doing: `Stage.doing`, used if no stage is stored on the exception.
    """
    from safetensors import SafetensorError

    has_path = isinstance(error, OSError) and error.filename
    # safetensors gives no path. huggingface_hub derives errors of the network from FileNotFoundError.
    without_path = type(error) is FileNotFoundError or isinstance(error, SafetensorError)
    if not (has_path or without_path or _rust_errno(error)):
        return None
    at = vars(error).get("finetune_stage") or Stage(doing)
    where = str(getattr(error, "filename", None) or "")[:LONGEST_NAME]
    found = (getattr(error, "strerror", None) or " ".join(str(error).split()))[:LONGEST]
    what, why = (
        f"a file changed while finetune {at.doing}",
        "another program may have deleted or replaced the file",
    )
    fix = "restore the file from a copy, let no other program change it, and run the command again"
    return UserError(
        Problem(what, at.key, where, found, fix=at.fix or fix, why=why, code="path"), code=at.code
    )


def _rust_errno(error: Exception) -> int:
    """Return the number of the system's error that a library in Rust names; 0 if it names none."""
    found = RUST_ERRNO.search(str(error))
    return int(found[1]) if found else 0


@contextlib.contextmanager
def only_user_errors(doing: str) -> Iterator[None]:
    """Raise every exception as a `UserError`, whose `__cause__` is the original exception.

    Args:
        doing: `Stage.doing`, used if no stage is stored on the exception.
    """
    try:
        with panics_as_errors():
            yield
    except UserError:
        raise
    except Exception as error:  # from any library; callers of the Python API get a UserError
        raise explain(error, doing, command=False) from error


LONGEST = 500  # characters of another library's message that are shown
YOURS = "your code"  # such as a callback that was given to `finetune.train`


def _raised_in(error: Exception, *, passed_code: bool) -> tuple[str, str, int]:
    """Return the library, file and line that caused an exception.

    Code of the caller, such as a callback, comes first. A missing attribute is the fault of the code that
    reads it. torch only runs the calls of others, so it is skipped, unless its own import failed.
    """
    named = [
        ((*_library_of(frame.filename), frame.lineno or 0), frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name not in ("__getattr__", "__getattribute__")
    ]
    frames = [frame for frame, _ in named]
    yours = [frame for frame in frames if frame[0] == YOURS and passed_code]
    callers = [
        frame
        for frame, name in named
        if frame[0] not in ("Python", "torch", YOURS) or (frame[0] == "torch" and name == "<module>")
    ]
    return (yours or callers or frames or [("Python", "", 0)])[-1]


def _raised_at_import(error: Exception) -> bool:
    """Return whether the code of a library's module raised an exception while Python imported it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [_library_of(frame.filename)[0] in ("finetune", "Python") for frame in frames]
    return any(frame.name == "<module>" and not ours for frame, ours in zip(frames, own, strict=True))


def _variables_of(library: str) -> list[str]:
    """Return the variables of the environment that begin with a library's name."""
    return [name for name in os.environ if name.startswith(f"{library.upper()}_")]


def _library_of(filename: str) -> tuple[str, str]:
    """Return the library of a source file, and the file's path in the library."""
    path = Path(filename)
    own = Path(__file__).parents[1]
    if path.is_relative_to(own):
        return "finetune", str(path.relative_to(own.parent))
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            inner = path.parts[path.parts.index(folder) + 1 :]
            return inner[0], "/".join(inner)
    # Code without a file, and code that torch has generated
    if filename.startswith("<") or "torchinductor" in filename:
        return "Python", path.name
    in_python = path.is_relative_to(Path(os.__file__).parent)
    return ("Python", path.name) if in_python else (YOURS, filename)


class Stopped(KeyboardInterrupt):
    """A signal or `--until` stopped a run that can be resumed (exit 75). The text names the saved files."""

    folder = ""
    """The run folder, as soon as it exists."""
    together = False
    """Whether all processes of the launch stop in this way."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most likely meaning of `name` among `names`, or the empty string.

    Names with two swapped letters come first: `lroa` means `lora`, not `road`. Then come names that begin
    with `name`, and then the most similar name.
    """
    if len(name) > LONGEST_NAME:
        return ""
    wanted, offered = name.lower(), sorted(names) if isinstance(names, Set) else names
    by_lower = {candidate.lower(): candidate for candidate in offered}
    turned = [wanted[:i] + wanted[i : i + 2][::-1] + wanted[i + 2 :] for i in range(len(wanted) - 1)]
    exact = [other for other in (wanted, *turned) if other in by_lower]
    exact += [other for other in by_lower if len(wanted) > 2 and other.startswith(wanted)]
    # The ratio of difflib is at most 2 * shorter / (shorter + longer)
    pairs = ((other, sorted((len(other), len(wanted)))) for other in by_lower)
    similar = [other for other, (short, long) in pairs if 2 * short >= SIMILAR * (short + long)]
    exact += get_close_matches(wanted, similar[:MOST_COMPARED], n=1, cutoff=SIMILAR)
    return by_lower[exact[0]] if exact else ""
