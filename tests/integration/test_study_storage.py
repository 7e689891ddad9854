"""Where studies are kept: SQLite, PostgreSQL, MySQL or a journal; many workers, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from finetune.core.errors import Exit, UserError
from finetune.experiments.sweep import study_storage, sweep_report
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
try:
    import postgres
finally:
    sys.path.pop(0)


def test_no_password_is_written_down() -> None:
    for url in (
        "postgresql://me:s3cr:t@/x@host:5432/db?sslmode=require",
        "mysql+pymysql://me:s3cr%3At@host/db",
        "postgresql://host/db?user=me&password=s3cr",
    ):
        assert "s3cr" not in study_storage.shown(url) and "host" in study_storage.shown(url)
        assert "s3cr" not in study_storage.redacted(
            f"can't open {url}: password s3cr", "postgresql://me:s3cr@h/d"
        )
    assert study_storage.shown("sqlite:////a/study.db") == "sqlite:////a/study.db"


def test_a_study_is_known_by_its_file_where_its_folder_was_renamed(tmp_path, monkeypatch) -> None:
    """The file is asked again where another worker is in its way, and no second study begins in it."""
    folder = tmp_path / "new"
    assert study_storage.name_in(f"sqlite:///{folder}/study.db", folder) == "new"
    folder.mkdir()
    url = f"sqlite:///{folder}/study.db"
    with study_storage.opened(url, "old"):
        pass
    assert study_storage.name_in(url, folder) == "old"
    assert study_storage.name_in("journal:x", folder) == "new"
    locked, listed = iter([True, False]), optuna.get_all_study_names

    def names(storage: Any) -> list[str]:
        if next(locked):
            raise optuna.exceptions.StorageInternalError
        return listed(storage)

    monkeypatch.setattr(optuna, "get_all_study_names", names)
    assert study_storage.name_in(url, folder) == "old"
    monkeypatch.setattr(study_storage, "TRIES", 1)
    (folder / "study.db").write_text("no database" * 1000)
    with pytest.raises(UserError, match="can't use the storage of the study") as raised:
        study_storage.name_in(url, folder)
    assert raised.value.code == Exit.ENVIRONMENT


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("postgresql://me:s3cr@127.0.0.1:1/db", Exit.ENVIRONMENT),
        ("mysql+nodriver://me:s3cr@h/db", Exit.INPUT),
        ("nothing at all s3cr", Exit.INPUT),
    ],
)
def test_a_storage_that_can_not_be_used(url: str, code: Exit, monkeypatch) -> None:
    monkeypatch.setattr(study_storage, "TRIES", 1)
    with pytest.raises(UserError) as raised, study_storage.opened(url, "x"):
        pass
    assert raised.value.code == code and "s3cr@" not in str(raised.value) and ":s3cr" not in str(raised.value)


SHARE = """
import os, sys, time
from finetune.experiments.sweep import study_storage
with study_storage.opened(sys.argv[1], "shared") as study:
    for _ in range(6):
        trial = study.ask()
        study_storage.describe(trial)
        x = trial.suggest_float("x", -1, 1)
        if len(sys.argv) > 2:
            os.kill(os.getpid(), 9)
        time.sleep(0.05)
        study.tell(trial, x * x)
"""


def shared(url: str) -> None:
    """Two workers begin in the same moment on an empty study; a third dies, and its trial is queued again."""
    share = [sys.executable, "-c", SHARE, url]
    pair = [subprocess.Popen(share, cwd=ROOT) for _ in range(2)]
    assert [process.wait() for process in pair] == [0, 0]
    with study_storage.opened(url, "shared") as study:
        rows = sweep_report.trials(study)
        assert [row["state"] for row in rows] == ["complete"] * 12
        names = [row["worker"] for row in rows]
        assert sorted(map(names.count, set(names))) == [6, 6]
        subprocess.run([*share, "dies"], cwd=ROOT, check=False)
        assert study_storage.take_over(study) == [12] and study_storage.take_over(study) == []
        states = [one.state for one in study.get_trials(deepcopy=False)]
        assert states[12:] == [TrialState.FAIL, TrialState.WAITING]
        assert study.ask().suggest_float("x", -1, 1) == study.get_trials()[12].params["x"]


def test_a_lost_trial_keeps_the_values_that_it_had_not_drawn_yet() -> None:
    """The recipe's own, of a worker that was killed between asking and drawing."""
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25}, {"own": True})
    study.tell(study.ask().number, state=TrialState.FAIL)
    assert study_storage.take_over(study) == [0]
    again = study.ask()
    assert again.user_attrs["own"] and again.suggest_float("x", -1, 1) == 0.25


@pytest.mark.soak
def test_two_workers_share_a_study_in_postgresql() -> None:
    if lacking := postgres.missing():
        pytest.skip(lacking)
    with postgres.serve() as (url, password):
        shared(url)
        wrong = url.replace(password, "wrong0")
        with pytest.raises(UserError) as raised, study_storage.opened(wrong, "shared"):
            pass
        assert "wrong0" not in str(raised.value) and raised.value.code == Exit.ENVIRONMENT


def test_two_workers_share_a_journal(tmp_path) -> None:
    shared(f"journal:{tmp_path}/study.log")


@pytest.mark.parametrize(
    ("name", "said"), [("none/a.log", "mkdir -p"), ("", "another file"), ("text.log", "not a journal")]
)
def test_a_journal_that_can_not_be_written(name: str, said: str, tmp_path) -> None:
    (tmp_path / "text.log").write_text("no JSON\nnor here\n")
    with pytest.raises(UserError) as raised, study_storage.opened(f"journal:{tmp_path}/{name}", "x"):
        pass
    text = str(raised.value)
    assert (
        raised.value.code == Exit.INPUT and said in text and "--storage journal:" in text and "help:" in text
    )


def test_a_journal_is_a_storage_too(tmp_path) -> None:
    url = f"journal:{tmp_path}/study.log"
    with study_storage.opened(url, "x", maximize=True) as study:
        study.tell(study.ask(), 1.0)
    with study_storage.opened(url, "x", maximize=True) as study:
        assert study.best_value == 1.0
    assert os.path.getsize(tmp_path / "study.log")
