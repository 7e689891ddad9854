"""A study of a sweep with a flipped byte: an error, or a study that is read as before; never other values."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import sqlite3
import struct
import warnings
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from finetune.core import safe_files
from finetune.core.errors import Exit, UserError
from finetune.experiments.runner import varied_keys
from finetune.experiments.sweep import search_space, study, study_storage, sweep_report
from finetune.recipe.loader import load
from support.paths import QUICKSTART

IDENTITY = {"adapter.r": "8", "data": "of one content"}
STATES = (TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
FINISHED = ("complete", "pruned", "failed")
STORAGES = {"sqlite:///": "study.db", "journal:": "study.log"}


def search(url: str) -> None:
    """A study with a trial of each kind, told as a sweep tells it."""
    with study_storage.opened(url, "s") as found:
        study.hold(found, Path("study"), IDENTITY)
        for number, state in enumerate(STATES):
            trial = found.ask()
            study_storage.describe(trial)
            rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
            kind = trial.suggest_categorical("kind", ["lora", "dora", None])
            trial.set_user_attr("values", {"train.learning_rate": rate, "adapter.type": kind})
            trial.report(number + 0.5, 1)
            trial.set_user_attr("seconds", 1.5)
            if state == TrialState.FAIL:
                trial.set_user_attr("reason", "exit 3")
            study_storage.tell(found, trial, rate if state == TrialState.COMPLETE else None, state)


def read(url: str) -> str:
    """All that a sweep takes from a study."""
    with study_storage.opened(url, "s") as found:
        study.hold(found, Path("study"), IDENTITY)
        trials = [[one.params, str(one.distributions)] for one in found.get_trials(deepcopy=False)]
        return json.dumps([sweep_report.trials(found), found.direction.name, trials])


def check_same(text: str, whole: str, offset: int) -> None:
    """Both are the same, but for trials that are not finished, which a sweep runs again."""
    (rows, *found), (rows_before, *before) = json.loads(text), json.loads(whole)
    again = [place for place, row in enumerate(rows) if row["state"] not in FINISHED]
    for place in again:
        rows[place], found[1][place] = rows_before[place], before[1][place]
    assert len(again) < 2 and [rows, *found] == [rows_before, *before], offset


@pytest.fixture(autouse=True)
def one_try(monkeypatch) -> None:
    monkeypatch.setattr(study_storage, "TRIES", 1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)


@pytest.mark.parametrize("count", [12, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("storage", STORAGES)
def test_study_with_a_flipped_byte_gives_no_other_values(tmp_path, storage: str, count: int) -> None:
    path = tmp_path / STORAGES[storage]
    url, draw = f"{storage}{path}", random.Random(count)
    search(url)
    content, whole = path.read_bytes(), read(url)
    used = [offset for offset, byte in enumerate(content) if byte]  # most pages of SQLite are empty
    refused = 0
    for offset in draw.sample(used, count):
        held = bytearray(content)
        held[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(held)
        try:
            check_same(read(url), whole, offset)
        except UserError as error:
            assert error.code in (Exit.INPUT, Exit.ENVIRONMENT, Exit.ARTIFACT)
            refused += 1
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError):  # `study.run` puts them into words
            refused += 1
    assert refused > count / 4


@pytest.mark.parametrize("storage", STORAGES)
def test_study_with_another_value_is_refused(tmp_path, storage: str) -> None:
    """A change that Optuna can't notice: each of them is of a value that decides on the best recipe."""
    url = f"{storage}{tmp_path / STORAGES[storage]}"
    search(url)
    text = (tmp_path / STORAGES[storage]).read_bytes()
    for old, new in ((b"dora", b"Dora"), (b"exit 3", b"exit 5"), (b"1.5", b"9.5")):
        changed = text.replace(old, new)
        assert changed != text
        (tmp_path / STORAGES[storage]).write_bytes(changed)
        with pytest.raises(UserError, match="the stored study is damaged") as raised:
            read(url)
        assert raised.value.code == Exit.ARTIFACT and "--output" in str(raised.value)


@pytest.mark.parametrize("storage", STORAGES)
def test_study_of_a_release_without_hashes_goes_on_and_is_verified_from_then_on(
    tmp_path, storage: str
) -> None:
    """Its trials are accepted once, with a note; a change after that is found, in old trials too."""
    path = tmp_path / STORAGES[storage]
    url = f"{storage}{path}"
    with study_storage.opened(url, "s") as found:
        found.set_user_attr("identity", IDENTITY)
        trial = found.ask()
        trial.set_user_attr("values", {"adapter.type": "dora"})
        found.tell(trial, 1.0)
    for notes in (1, 0):  # a command that is stopped, and the next one
        with study_storage.opened(url, "s") as found:
            said = study.hold(found, Path("study"), IDENTITY)
            assert [one.startswith("trials of an older finetune version: 1") for one in said] == [
                True
            ] * notes
            study_storage.tell(found, found.ask(), 0.5, TrialState.COMPLETE)
    assert read(url).count('"state": "complete"') == 3
    path.write_bytes(path.read_bytes().replace(b"dora", b"Dora"))
    with pytest.raises(UserError, match="trial 0"):
        read(url)


def test_study_of_a_release_with_fewer_keys_goes_on_and_one_of_another_recipe_is_left_as_it_was(
    tmp_path,
) -> None:
    """A key that finetune has now, and that changes no result, is no other recipe."""
    url = f"sqlite:///{tmp_path}/study.db"
    with study_storage.opened(url, "s") as found:
        found.set_user_attr("identity", IDENTITY)
        found.tell(found.ask(), 1.0)
        before = dict(found.user_attrs)
        with pytest.raises(UserError, match=r"other values of adapter\.r"):
            study.hold(found, Path("study"), IDENTITY | {"adapter.r": "4"})
        assert found.user_attrs == before
        study.hold(found, Path("study"), IDENTITY | dict.fromkeys(varied_keys.NO_RESULT, "5"))


HOST = platform.node()
TRIALS: list[dict[str, Any]] = [
    *({"worker": value} for value in (5, None, [], "x", f"{HOST} a b", f"{HOST} -1 0", f"{HOST} {2**70} 1")),
    *({"alive": value} for value in ("x", None, [], float("nan"), 1e300)),
    *({"times": value} for value in ("x", None, 1e9, -1)),
    {"again": [1]},
    {"without": 5},
    {"reason": 5},
    {"own": "no"},
]


@pytest.mark.parametrize("attributes", TRIALS, ids=str)
def test_study_with_an_odd_value_of_a_trial_is_refused(attributes: dict[str, Any], tmp_path) -> None:
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "s") as found:
        trial = found.ask()
        for key, value in attributes.items():
            trial.set_user_attr(key, value)
        with pytest.raises(UserError, match="the stored study is damaged") as raised:
            study.hold(found, tmp_path, IDENTITY)
    assert raised.value.code == Exit.ARTIFACT


@pytest.mark.parametrize("number", [0, 7, -3, 2**62])
def test_study_whose_trials_are_numbered_otherwise_is_refused(number: int, tmp_path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    search(url)
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute("UPDATE trials SET number = ? WHERE number = 1", [number])
        database.commit()
    with pytest.raises(UserError, match="the stored study is damaged") as raised:
        read(url)
    assert raised.value.code == Exit.ARTIFACT


def test_study_that_searches_the_other_way_is_refused(tmp_path) -> None:
    """The hashes are of trials, and Optuna keeps the stored direction of a study."""
    url = f"sqlite:///{tmp_path}/study.db"
    search(url)
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute("UPDATE study_directions SET direction = 'MAXIMIZE'")
        database.commit()
    with pytest.raises(UserError, match="changed parts: the direction, maximize"):
        read(url)


RANGES = {"range": {"low": 1e-4, "high": 1e-2, "log": True}, "choices": {"choices": [1e-4, 1e-3]}}


@pytest.mark.parametrize("value", ["evil", float("nan"), [1], -1.0, 1e5, None], ids=str)
@pytest.mark.parametrize("kind", RANGES)
def test_queued_trial_with_a_value_outside_of_the_space_is_not_drawn(kind: str, value: Any, tmp_path) -> None:
    parameters = {"train.learning_rate": search_space.Parameter.model_validate(RANGES[kind])}
    space = search_space.Space(tmp_path, search_space.Search(), parameters)
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "s") as found:
        found.enqueue_trial({"train.learning_rate": value})
        with pytest.raises((ValueError, TypeError, LookupError)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna's, of a fixed value outside of the range
            search_space.draw(found.ask(), space, load(QUICKSTART))


@pytest.mark.parametrize("value", [5, [], {"a": []}, None], ids=str)
def test_study_with_an_odd_identity_is_refused(value: Any, tmp_path) -> None:
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "s") as found:
        found.set_user_attr("identity", value)
        with pytest.raises(UserError, match="the stored study is damaged"):
            study.hold(found, tmp_path, IDENTITY)


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT"
PROGRAMS = {
    "view": f"CREATE VIEW more AS {ENDLESS} x FROM c",
    "trigger": "CREATE TRIGGER more AFTER INSERT ON study_user_attributes BEGIN "
    f"INSERT INTO studies(study_name) {ENDLESS} 'a' || x FROM c; END",
    "virtual table": "CREATE VIRTUAL TABLE more USING fts5(a)",
    "function in a check": "CREATE TABLE more (a, CHECK (length(hex(zeroblob(400000000))) > 0))",
    "function in an index": "CREATE INDEX more ON studies (hex(zeroblob(study_id)))",
    "pattern": "CREATE TABLE more (a, CHECK (a LIKE '%a%a%a%a%a%b'))",
    "computed columns": "CREATE TABLE more (z, a AS ('0123456789'), b AS (a || a), c AS (b || b) NOT NULL)",
    "operator in an index": "CREATE INDEX more ON studies (study_name || study_name)",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_study_with_a_program_in_its_database_is_refused(program: str, tmp_path) -> None:
    """A query of an endless view, or a write with an endless trigger, would never come back."""
    url = f"sqlite:///{tmp_path}/study.db"
    search(url)
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as database:
        database.execute(PROGRAMS[program])
        database.commit()
    for ask in (lambda: study_storage.name_in(url, tmp_path), lambda: read(url)):
        with pytest.raises(UserError, match=r"views, triggers, virtual tables, functions"):
            ask()


@pytest.mark.parametrize("linked", [False, True])
def test_study_whose_journal_names_another_file_is_refused(linked: bool, tmp_path) -> None:
    """SQLite rolls the journal of a stopped writer back, and then deletes the super-journal that it names."""
    path, victim, journal = tmp_path / "study.db", tmp_path / "victim", tmp_path / "study.db-journal"
    victim.write_text("precious")
    search(f"sqlite:///{path}")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")  # so that the journal is on the disk before the commit
        database.execute("CREATE TABLE more (a)")
        database.execute("BEGIN")
        database.executemany("INSERT INTO more VALUES (?)", [("x" * 500,)] * 500)
        stopped, written = journal.read_bytes(), path.read_bytes()
    path.write_bytes(written)
    journal.write_bytes(stopped)
    read(f"sqlite:///{path}")  # as after a kill: SQLite rolls back
    path.write_bytes(written)
    name = os.fsencode(victim)
    end = struct.pack(">II", len(name), sum(name)) + study_storage.NAMES_A_FILE
    aligned = stopped.ljust(-len(stopped) // 512 * -512, b"\0")
    journal.write_bytes(aligned + struct.pack(">I", 2**30 // 4096 + 1) + name + end)
    if linked:
        (tmp_path / "link.db").symlink_to(path)
    with pytest.raises(UserError, match="names another file"):
        read(f"sqlite:///{tmp_path / 'link.db' if linked else path}")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["hard link", "link", "file"])
@pytest.mark.parametrize("end", ["-shm", "-wal"])
@pytest.mark.parametrize("in_header", [True, False], ids=["WAL in the header", "WAL only by its files"])
def test_study_in_wal_mode_leaves_files_of_others(in_header: bool, end: str, kind: str, tmp_path) -> None:
    """SQLite maps study.db-shm, and cuts it to the size of its index."""
    path, victim, other = tmp_path / "study.db", tmp_path / "victim", tmp_path / f"study.db{end}"
    search(f"sqlite:///{path}")
    if in_header:
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA journal_mode = WAL")
    victim.write_text("precious\n" * 6000)
    if kind == "hard link":
        os.link(victim, other)
    elif kind == "link":
        other.symlink_to(victim)
    else:
        other.write_bytes(b"precious")
    content = other.read_bytes()
    for ask in (
        lambda: study_storage.name_in(f"sqlite:///{path}", tmp_path),
        lambda: read(f"sqlite:///{path}"),
    ):
        with pytest.raises(UserError, match="the WAL mode of SQLite"):
            ask()
    assert other.read_bytes() == content and victim.read_text() == "precious\n" * 6000


@pytest.mark.parametrize("storage", STORAGES)
def test_study_file_with_a_hard_link_is_left_as_it_is(storage: str, tmp_path) -> None:
    """Its other name may be a file of somebody else, into which the sweep would write."""
    url, path, victim = f"{storage}{tmp_path}/study.log", tmp_path / "study.log", tmp_path / "victim"
    search(url)
    os.link(path, victim)
    content = victim.read_bytes()
    with pytest.raises(UserError, match="has hard links"):
        search(url)
    assert victim.read_bytes() == content


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_study_file_that_would_never_end_is_refused(kind: str, storage: str, tmp_path) -> None:
    path = tmp_path / "study.log"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, safe_files.LARGEST + 1)
    with pytest.raises(UserError, match=r"only regular files|too large"):
        read(f"{storage}{path}")
