"""Storage of a study: SQLite in its folder, a database for many machines, or a journal on a shared disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
import psutil
import sqlalchemy
from alembic.util.exc import CommandError
from optuna.distributions import distribution_to_json
from optuna.trial import TrialState
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from finetune.core import packages, regular_files, safe_files
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.run_folder import file_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optuna.pruners import BasePruner
    from optuna.study import Study
    from optuna.trial import FrozenTrial

JOURNAL = "journal:"
# Keys of a study's attributes: the hash of one trial, and whether all trials have a hash
HASH, HASHED = "sha256 of trial", "hashed"
# Exceptions of Optuna for a changed value, and of alembic for the version of the tables
UNREADABLE = (
    ValueError, TypeError, LookupError, AssertionError, AttributeError, RuntimeError, CommandError,
)  # fmt: skip
SHOWN = 100  # characters shown of Optuna's message on a damaged study
SILENT = 120.0  # seconds without a sign of life after which a trial may be lost
WATCHED = 30.0  # seconds within which a living worker gives another sign of life
# Tolerance in seconds for the start time of a process, because the boot time is known only to the second
ROUNDED = 2.0
MOST_TIMES = 3  # limit of repetitions, because the trial itself may crash its workers
OWN_CHECK = "check (version_info_id=1)"  # Optuna's tables have no other check
# Words of SQL by which a column or an index computes values. Names of functions are such words too
COMPUTES = {"virtual", "as", "check", "where", "collate", "default", "case", "like", "glob", "in", "is"}
NAMES_A_FILE = bytes.fromhex("d9d505f920a163d7")  # end of a journal of SQLite that names a super-journal
TRIES = 5  # attempts to create the tables, because two starting workers can conflict


def shown(url: str) -> str:
    """Return the URL without its password, in a form that can be printed."""
    plain = re.sub(r"(?<=://)([^/@:]*):.*@(?=[^/@]*(/|$|\?))", r"\1:***@", url)
    return re.sub(
        r"((?:password|passwd|pwd|passfile|sslpassword)=)[^&]*", r"\1***", plain, flags=re.IGNORECASE
    )


def redacted(text: str, url: str) -> str:
    """Return a library's message without the password in the URL."""
    try:
        found = sqlalchemy.make_url(url)
        secrets = [found.password, *(v for k, v in found.query.items() if "pass" in k.lower() or k == "pwd")]
    except ArgumentError:
        secrets = []
    for secret in filter(None, map(str, secrets)):
        text = text.replace(secret, "***")
    return " ".join(text.replace(url, shown(url)).split())


@contextlib.contextmanager
def opened(
    url: str, name: str, *, maximize: bool = False, pruner: BasePruner | None = None
) -> Iterator[Study]:
    """Open the study with this name, or create it. The connections are closed at the end.

    Args:
        url: `sqlite:///FILE`, `postgresql://user@host/database`, `mysql+pymysql://...`, `journal:FILE`.

    Raises:
        UserError: the storage cannot be reached, or its driver is not installed (exit 3). The URL is not
            valid, or the journal cannot be written (exit 2).
    """
    _check_password(url)
    direction = "maximize" if maximize else "minimize"
    given: dict[str, Any] = {"study_name": name, "direction": direction, "load_if_exists": True}
    with contextlib.ExitStack() as stack:
        yield _asked(url, stack, lambda storage: optuna.create_study(storage=storage, pruner=pruner, **given))


def _check_password(url: str) -> None:
    """Refuse an address whose password holds a sign that a driver takes for its end (exit 2)."""
    login = re.match(r"[\w+]+://[^\s/:@]*:(?!\d{1,5}/)(?P<password>.*)@", url)
    if login and re.search("[@/?#]", login["password"]):
        raise UserError(
            Problem(
                "the password of the storage holds a sign that must be escaped",
                where="--storage",
                found="one of @ / ? #",
                expected="%40, %2F, %3F or %23",
                fix="python -c \"from urllib.parse import quote; print(quote(input(), safe=''))\" escapes it",
                why="the driver would take the rest of the password for a host, and show it",
                code="experiment",
            )
        )


def name_in(url: str, folder: Path) -> str:
    """Return the name of a folder's study: the folder's name, or the stored name if the folder was renamed.

    Raises:
        UserError: the file cannot be read. A second study might start in it otherwise (exit 3).
    """
    own = folder.resolve() / "study.db"
    if url != f"sqlite:///{own}" or not own.exists():
        return folder.name
    with contextlib.ExitStack() as stack:
        names = _asked(url, stack, optuna.get_all_study_names)
    return names[0] if len(names) == 1 else folder.name


def _asked(url: str, stack: contextlib.ExitStack, ask: Callable[[Any], Any]) -> Any:
    """Return the result of `ask` for a storage that `stack` closes.

    Retry if another worker causes a conflict.
    """
    for left in reversed(range(TRIES)):
        try:
            return ask(_storage(url, stack))
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
            if isinstance(error, ArgumentError) or not left:
                code = Exit.INPUT if isinstance(error, ArgumentError) else Exit.ENVIRONMENT
                raise unreachable(error, url, code) from None
            time.sleep(0.5)
        except ImportError as error:
            raise _no_driver(error, url) from None
        except UNREADABLE as error:
            if isinstance(error, ValueError) and url.startswith(JOURNAL):
                raise _no_journal(error, url) from None
            raise damaged(f"--storage {shown(url)}", [_unreadable(error)]) from None
        except OSError as error:
            if not url.startswith(JOURNAL):
                raise
            raise _no_journal(error, url) from None
    raise AssertionError


def _no_driver(error: ImportError, url: str) -> UserError:
    is_postgres = "postgres" in url
    driver = "pymysql" if "mysql" in url else "the driver of the database"
    return UserError(
        Problem(
            "the driver of this database is not installed",
            where="--storage",
            found=f"{shown(url)}: {redacted(str(error.__cause__ or error), url)}",
            fix=packages.install_extra("sweep") if is_postgres else f"install {driver} with pip",
            code="package-missing",
        ),
        code=Exit.ENVIRONMENT,
    )


def _no_journal(error: OSError | ValueError, url: str) -> UserError:
    """Return the error for a journal that cannot be written, or that holds other content."""
    path = Path(url.removeprefix(JOURNAL))
    if isinstance(error, ValueError):
        what, found = "the file is not a journal of Optuna", "other content"
        fix = "name a file that does not exist yet"
    elif not path.parent.is_dir():
        what, found = "finetune can't write the journal", f"the folder {path.parent} does not exist"
        fix = f"mkdir -p {shlex.quote(str(path.parent))}"
    else:
        what, found = "finetune can't write the journal", error.strerror or str(error)
        fix = "name another file"
    return UserError(Problem(what, where=f"--storage {url}", found=found, fix=fix, code="experiment"))


def unreachable(error: Exception, url: str, code: Exit = Exit.ENVIRONMENT) -> UserError:
    """Return a database error as a UserError without the password."""
    said = redacted(first_line(error.__cause__ or error), url)
    what = "finetune can't use the storage of the study"
    return UserError(
        Problem(
            "the value is not a storage URL" if code == Exit.INPUT else what,
            where="--storage",
            found=f"{shown(url)}: {said}",
            expected="sqlite:///FILE, postgresql://user@host/database, mysql+pymysql://..., journal:FILE",
            fix="--storage sqlite:///study.db",
            code="experiment",
        ),
        code=code,
    )


def _storage(url: str, stack: contextlib.ExitStack) -> Any:
    """Return Optuna's storage, which `stack` closes."""
    if url.startswith(JOURNAL):
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        path = url.removeprefix(JOURNAL)
        if os.path.exists(path) and not os.path.isdir(path):  # a read of a pipe never ends
            _check_file(Path(path))
        return JournalStorage(JournalFileBackend(path))
    options: dict[str, Any] = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    # SQLAlchemy below 2.1 does not select psycopg 3 by itself
    full = re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)
    if url.startswith("sqlite"):
        _check_database(full)
    made = optuna.storages.RDBStorage(full, engine_kwargs={"pool_pre_ping": True, **options})
    stack.callback(made.engine.dispose)
    stack.callback(made.remove_session)
    if url.startswith("sqlite"):
        with made.engine.connect() as connection:
            said = connection.exec_driver_sql("PRAGMA integrity_check").scalar()
        if said != "ok":  # for example if a page has lost a row
            raise ValueError(said)
    return made


def _check_database(url: str) -> None:
    """Check that a SQLite file holds only what a study has (ValueError).

    Views, triggers, functions and computed columns in the schema run with each query or write, and may never
    end. If a journal names another file, SQLite deletes that file. Optuna makes none of them.

    Raises:
        UserError: the file is not regular or too large, or is in the WAL mode of SQLite (exit 2).
    """
    path = Path(sqlalchemy.make_url(url).database or "").resolve()
    if path.exists() and not path.is_dir():
        _check_file(path)
    _refuse_wal(path)
    journal = path.with_name(f"{path.name}-journal")
    if journal.exists():
        _check_file(journal)
        if journal.read_bytes().endswith(NAMES_A_FILE):
            raise ValueError(f"{journal.name} names another file, which SQLite would delete")
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT type, coalesce(sql, '') FROM sqlite_master").all()
            known = connection.exec_driver_sql("SELECT name FROM pragma_function_list").scalars().all()
    finally:
        engine.dispose()
    schema = " ".join(sql for _, sql in rows).lower().replace(OWN_CHECK, "")
    words = set(re.findall(r"\w+", schema))
    programs = words & (COMPUTES | {*known} - {"datetime"})  # Optuna's tables have columns of type DATETIME
    operators = re.search(r"[^\w\s(),\"]", schema)
    if programs or operators or {kind for kind, _ in rows} - {"table", "index"}:
        raise ValueError("the database has views, triggers, virtual tables, functions or computed columns")


def _refuse_wal(path: Path) -> None:
    """Refuse a database in the WAL mode of SQLite, whose two other files SQLite maps and overwrites.

    SQLite uses this mode if the header says so, or if such a file exists.
    """
    others = [path.with_name(f"{path.name}{end}") for end in ("-wal", "-shm")]
    with contextlib.suppress(OSError), path.open("rb") as file:
        is_wal = 2 in file.read(20)[18:]
        if not is_wal and not any(map(os.path.lexists, others)):
            return
        name = shlex.quote(str(path))
        raise UserError(
            Problem(
                "the study is in the WAL mode of SQLite",
                where=str(path),
                fix=f"if it is your study: sqlite3 {name} 'PRAGMA journal_mode=DELETE'",
                why="SQLite would write to two more files, which can be links to other files",
                code="unsafe-file",
            )
        )


def _check_file(path: Path) -> None:
    """Refuse a file that a storage can't read to its end, or that may be a file of somebody else.

    Raises:
        UserError: the file is not regular, too large, or has hard links (exit 2).
    """
    regular_files.check_regular(path, limit=safe_files.LARGEST)
    if path.stat().st_nlink > 1:
        file = shlex.quote(str(path))
        raise UserError(
            Problem(
                "a file of the study has hard links",
                where=str(path),
                fix=f"cp {file} {file}.copy && mv {file}.copy {file}",
                why="a sweep writes to this file, and its other name may be a file of somebody else",
                code="unsafe-file",
            )
        )


def describe(trial: optuna.Trial) -> None:
    """Store which process runs a trial: its host, process id and start time in seconds after boot."""
    own = psutil.Process()
    trial.set_user_attr("worker", f"{platform.node()} {own.pid} {_began(own):.2f}")


def _began(process: psutil.Process) -> float:
    """Return the start time of a process relative to boot, which does not change if the clock is set."""
    return process.create_time() - psutil.boot_time()


def tell(study: Study, trial: optuna.Trial, value: float | None, state: TrialState) -> None:
    """Report the result of a trial. The study stores a hash of the trial.

    Raises:
        UpdateFinishedTrialError: another worker has reported a result before.
    """
    told = study.get_trials(deepcopy=False)[trial.number]
    study.set_user_attr(f"{HASH} {trial.number}", _hash(told, value, state))
    try:
        study.tell(trial, value, state=state)
    except ValueError as error:  # `study.tell` raises this when it checks the trial before writing
        raise optuna.exceptions.UpdateFinishedTrialError(str(error)) from None


def verify(study: Study, where: str) -> list[int]:
    """Compare the finished trials with the hashes that `tell` stored.

    A trial with a hash that is not finished is run again, because its worker ended during `tell`.

    Returns:
        Numbers of the trials without a hash, which an older version of finetune finished.

    Raises:
        UserError: a trial or the study differs from its hash (exit 4).
    """
    try:
        every = study.get_trials(deepcopy=False)
        trials = {one.number: one for one in every}
        if trials.keys() != {*range(len(every))}:
            raise ValueError("its trials are not numbered from 0")
        file_shapes.check("study", study.user_attrs)
        for one in trials.values():
            fixed = {key: value for key, value in one.system_attrs.items() if key == "fixed_params"}
            file_shapes.check("trial", {**one.user_attrs, **fixed})
        kept = {name: value for name, value in study.user_attrs.items() if name.startswith(HASH)}
        hashes = {int(name.removeprefix(HASH)): value for name, value in kept.items()}
        told = {number for number, one in trials.items() if one.state.is_finished() and not is_lost(one)}
        old = set[int]() if study.user_attrs.get(HASHED) else told - hashes.keys()
        missing = hashes.keys() - trials.keys()
        wrong = [number for number in told - old if hashes.get(number) != _hash(trials[number])]
        parts = [f"trial {number}" for number in sorted({*missing, *wrong})]
    except UNREADABLE as error:
        raise damaged(where, [_unreadable(error)]) from None
    if parts:
        raise damaged(where, parts)
    return sorted(old)


def add_hashes(study: Study, numbers: list[int]) -> None:
    """Store hashes of trials that have none. From now on, each finished trial must have a hash."""
    trials = study.get_trials(deepcopy=False)
    for number in numbers:
        study.set_user_attr(f"{HASH} {number}", _hash(trials[number]))
    # Set this last, so that a worker that ends early adds the hashes again
    if not study.user_attrs.get(HASHED):
        study.set_user_attr(HASHED, True)


def _unreadable(error: Exception) -> str:
    return f"Optuna can't read the study ({type(error).__name__}: {first_line(error)[:SHOWN]})"


def damaged(where: str, parts: list[str]) -> UserError:
    return UserError(
        Problem(
            "the stored study is damaged",
            where=where,
            found=f"changed parts: {', '.join(parts[:10])}",
            fix="choose a new folder with --output, or restore the storage from a backup",
            code="experiment",
        ),
        code=Exit.ARTIFACT,
    )


def _hash(trial: FrozenTrial, value: float | None = None, state: TrialState | None = None) -> str:
    """Return a hash of everything that a search uses of a finished trial.

    Args:
        value: the result, if it is being reported now.
        state: the state, if it is being reported now.
    """
    state = state or trial.state
    value = (trial.value if value is None else value) if state == TrialState.COMPLETE else None
    kinds = {name: distribution_to_json(kind) for name, kind in trial.distributions.items()}
    told = [trial.params, kinds, trial.user_attrs, trial.intermediate_values]
    parts = [trial.number, state.name, value, *told]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def is_lost(trial: FrozenTrial) -> bool:
    """Return whether a trial failed because its worker ended.

    Trials that fail by themselves have a reason.
    """
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs


def take_over(study: Study) -> list[int]:
    """Fail the trials of dead workers, queue their parameters again, and return their numbers."""
    for trial in _dead(study):
        # another worker can be faster
        with contextlib.suppress(ValueError, optuna.exceptions.UpdateFinishedTrialError):
            study.tell(trial.number, state=TrialState.FAIL)
    again = {trial.user_attrs.get("again") for trial in study.get_trials(deepcopy=False)}
    found = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.FAIL,)):
        times = trial.user_attrs.get("times", 0) + 1
        if is_lost(trial) and trial.number not in again and times <= MOST_TIMES:
            kept = {key: trial.user_attrs[key] for key in ("own", "without") if key in trial.user_attrs}
            # The worker may have ended before it drew a value
            given = trial.system_attrs.get("fixed_params", {})
            study.enqueue_trial({**given, **trial.params}, {**kept, "again": trial.number, "times": times})
            found.append(trial.number)
    return found


def _dead(study: Study) -> list[FrozenTrial]:
    """Return the running trials whose workers have ended here, or give no sign of life on another machine.

    The clocks of two machines can differ, and can be set. So a sign of life that looks too old or too new is
    watched. A living worker soon gives another one.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    found: list[FrozenTrial] = []
    silent: dict[int, float] = {}
    for trial in running:
        host, _, process = trial.user_attrs.get("worker", "").partition(" ")
        if host == platform.node():
            found += [trial] * _is_gone(process)
        elif abs(time.time() - _sign_of_life(trial)) > SILENT:
            silent[trial.number] = _sign_of_life(trial)
    if silent:
        time.sleep(WATCHED)
        later = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        found += [trial for trial in later if silent.get(trial.number) == _sign_of_life(trial)]
    return found


def _sign_of_life(trial: FrozenTrial) -> float:
    """Return when a trial's worker last reported that it is alive, by the clock of its machine."""
    began = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
    return trial.user_attrs.get("alive", began)


def _is_gone(process: str) -> bool:
    """Return whether a process of this machine has ended. Another process may have its number now."""
    number, _, began = process.partition(" ")
    try:
        return abs(_began(psutil.Process(int(number))) - float(began)) > ROUNDED
    except psutil.NoSuchProcess:
        return True
