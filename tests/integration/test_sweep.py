"""finetune sweep: a study of two real trials, one of them left by a worker that was killed."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import TrialState

from finetune.cli import main
from finetune.core.console import Console
from finetune.core.errors import Exit, UserError
from finetune.experiments.runner import kept_runs, worker_process
from finetune.experiments.sweep import search_space, search_space_checks, study_storage, sweep_report
from finetune.experiments.sweep import study as sweep_study
from finetune.experiments.sweep.search_space_checks import SweepRequest
from finetune.recipe import loader
from support import tables
from support.child_processes import Child
from support.paths import QUICKSTART, ROOT
from support.printed_commands import assert_commands_run
from support.runs import show_progress_at_once
from support.soak import soak_except

SPACE = """
search: {evaluations: 2, startup_trials: 2}
space:
  train.learning_rate: {low: 0.5, high: 2, log: true, times: train.learning_rate}
  train.weight_decay: {choices: [0.0, 1.0e+38]}
  adapter.r: {low: 2, high: 16}
"""
LEFT = {
    "train.learning_rate": 1.25,
    "train.weight_decay": "1e+38",
    "adapter.r": 5,
}  # by the worker that is gone


@pytest.fixture(scope="module")
def study(tmp_path_factory, small, two_layers) -> Path:
    """What a study of two trials left behind."""
    folder = tmp_path_factory.mktemp("tune") / "study"
    folder.mkdir()
    (folder.parent / "space.yaml").write_text(SPACE)
    url = f"sqlite:///{folder}/study.db"
    with study_storage.opened(url, "study") as begun:
        begun.enqueue_trial(LEFT)
    code = (
        "import os; from finetune.experiments.sweep import study_storage\n"
        f"with study_storage.opened({url!r}, 'study') as study:\n"
        "    gone = study.ask()\n"
        "    study_storage.describe(gone)\n"
        "    gone.suggest_float('train.learning_rate', 0.5, 2, log=True)\n"
        "    gone.suggest_categorical('train.weight_decay', ['0.0', '1e+38'])\n"
        "    gone.suggest_int('adapter.r', 2, 16)\n"
        "    os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    words = ["sweep", str(QUICKSTART), *small, f"model.name={two_layers}", "train.max_steps=4"]
    words += ["train.warmup_steps=0", "train.effective_batch_size=8", "train.logging_steps=1"]
    words += ["train.weight_decay=0.0", "--space", str(folder.parent / "space.yaml")]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        show_progress_at_once(patch)
        assert main.main([*words, "--trials", "2", "--output", str(folder)]) == 0
    (folder.parent / "printed.txt").write_text(printed.getvalue())
    return folder


@pytest.fixture
def found(study: Path) -> dict[str, Any]:
    return json.loads((study / "trials.json").read_text())


def test_a_trial_whose_worker_was_killed_is_run_again_with_the_same_values(found) -> None:
    """And it is not counted twice. Its values overflow: pruned, with the reason, and the study goes on."""
    lost, own, again = found["trials"]
    assert lost["state"] == "lost" and lost["reason"] == "the worker ended; the study ran it again as trial 2"
    assert own["own"] and own["state"] == "complete" and own["values"] == {
        "train.learning_rate": 4e-3, "train.weight_decay": 0.0, "adapter.r": 16,
    }  # fmt: skip
    assert again["values"] == {"train.learning_rate": 5e-3, "train.weight_decay": 1e38, "adapter.r": 5}
    assert again["state"] == "pruned" and "NaN or Inf" in again["reason"]
    assert sum(found["counts"].values()) - found["counts"]["lost"] == 2


def test_a_sweep_shows_its_progress(study: Path) -> None:
    printed = (study.parent / "printed.txt").read_text()
    assert re.search(r"^checking the search space: [\d.]+ s$", printed, re.MULTILINE)
    assert re.search(r"^sweep, trial \d: \d+%, .* left$", printed, re.MULTILINE)


def test_tables_of_a_sweep_fit_80_and_120_columns(study, found) -> None:
    asked = SweepRequest(str(QUICKSTART), [], study.parent / "space.yaml", study, 2, None, "")
    tables.assert_tables_fit(lambda: sweep_report.show(Console(), asked, found))
    assert_commands_run((study.parent / "printed.txt").read_text())


def test_a_trial_is_an_ordinary_run(study, found) -> None:
    """Its value is that of the weights that were saved and opened again; answers were not asked for."""
    (own,) = [row for row in found["trials"] if row["number"] == found["own"]]
    result = json.loads((study / own["folder"] / "eval.json").read_text())
    assert result["tuned"]["loss"] == own["value"] and result["samples"] == []
    assert result["tuned"]["exact_match"] is None and "tuned" not in result["worst"][0]
    assert len(own["evaluations"]) == 2 and own["evaluations"][-1] == pytest.approx(own["value"], rel=1e-3)
    run_checks = json.loads((study / own["folder"] / "checks.json").read_text())
    assert all(check["passed"] for check in run_checks)
    assert 0 < own["started_seconds"] < own["seconds"]


def test_the_best_recipe_checks_and_says_where_its_values_are_from(study, found, capsys) -> None:
    best = next(row for row in found["trials"] if row["number"] == found["best"])
    loaded = loader.load(study / "best.yaml")
    assert loaded.train.learning_rate == best["values"]["train.learning_rate"]
    tried = loader.load(study / best["folder"] / "recipe.resolved.yaml")
    assert loaded.eval.eval_steps == tried.eval.eval_steps is not None, "else it would keep the last weights"
    assert loaded.train.output_dir is None and loaded.speed.compile == "auto" and loaded.eval.generate
    text = (study / "best.yaml").read_text()
    assert f"# sweep: trial {best['number']}, from 2 to 16" in text
    assert main.main(["check", str(study / "best.yaml")]) == 0
    assert f"next: finetune train {study}/best.yaml" not in capsys.readouterr().err


def test_tables_and_pictures_are_left(study, found) -> None:
    rows = list(csv.DictReader((study / "trials.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == [row["state"] for row in found["trials"]]
    page = (study / "sweep.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert page.count("<svg") == len(list(study.glob("*.svg"))) >= 4
    assert "NaN or Inf" in page and found["best"] is not None


def test_a_study_is_not_gone_on_with_by_another_recipe(study) -> None:
    with study_storage.opened(f"sqlite:///{study}/study.db", "study") as begun:
        own = dict(begun.user_attrs["identity"])
        assert own["train.max_steps"] == "4" and own["space.adapter.r"] == '{"low": 2, "high": 16}'
        sweep_study.hold(begun, study, own)
        with pytest.raises(UserError) as raised:
            sweep_study.hold(begun, study, own | {"train.max_steps": "5"})
        with pytest.raises(UserError, match="other values of rows of the data"):
            sweep_study.hold(begun, study, own | {"rows of the data": "0" * len(own["rows of the data"])})
        with pytest.raises(UserError, match="other values of the files of the base model"):
            sweep_study.hold(begun, study, own | {"the files of the base model": "0" * 64})
    said = str(raised.value)
    assert (
        "holds an experiment with other values of train.max_steps" in said and raised.value.code == Exit.INPUT
    )


def test_a_first_trial_may_be_the_best() -> None:
    rows = [{"number": 0, "state": "complete", "value": 0.5, "own": True, "reason": ""}]
    rows.append({"number": 1, "state": "pruned", "value": None, "own": False, "reason": "exit 5: nan"})
    content = {"best": 0, "own": 0, "trials": rows, "direction": "minimize"}
    assert (
        sweep_report.verdict(content, "loss") == "The recipe's own values are the best: loss 0.5 (trial 0)."
    )
    asked = SweepRequest("a.yaml", [], Path("s.yaml"), Path("runs/sweep-a"), None, None, "")
    assert sweep_report.next_step(asked, content) == "finetune train runs/sweep-a/best.yaml"
    assert sweep_report.next_step(asked, content | {"best": None}).startswith("finetune sweep a.yaml")
    limited = sweep_report.next_step(asked._replace(trials=30, seconds=5400.0), content | {"best": None})
    assert limited.endswith("--output runs/sweep-a --trials 30 --hours 1.5")
    assert [str(problem) for problem in sweep_study.problems(content)] == [
        "error: trial 1 pruned [experiment]\n  found:     exit 5: nan\n"
        "  help:      read logs/trial-0001.txt in the folder of the sweep"
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["data.validation=null"], "validation set"),
        (
            [
                "eval.tasks=[general_knowledge]",
                "eval.eval_steps=2",
                "eval.metric_for_best_model=general_knowledge/acc",
            ],
            "eval.metric_for_best_model",
        ),
        (["--space", "none.yaml"], "can't read the search space"),
        (["--space", "recipes"], "name a file of this folder: "),
        (["--trials", "0"], ""),
    ],
)
def test_what_can_not_be_searched_is_exit_2(more: list[str], said: str, tmp_path, capsys) -> None:
    words = ["sweep", str(QUICKSTART), "--output", str(tmp_path / "study"), *more]
    assert main.main(words) == Exit.INPUT
    assert said in capsys.readouterr().err


def test_evaluations_are_read_as_they_are_written(tmp_path) -> None:
    """A torn line waits for its rest; a value that is no number is one."""
    path = tmp_path / "metrics.jsonl"
    metrics = worker_process.Metrics(path, "eval_loss")
    assert list(metrics.new()) == []
    path.write_text('{"step": 1, "loss": 2.0, "step_seconds": 0.1}\n{"step": 1, "eval_lo')
    assert list(metrics.new()) == [] and metrics.first["step"] == 1
    with path.open("a") as file:
        file.write('ss": 1.5}\n{"step": 2, "eval_loss": "NaN"}\n')
    first, second = metrics.new()
    assert (
        first == worker_process.Evaluation(1, 1, 1.5) and second.place == 2 and second.value != second.value
    )


@pytest.mark.parametrize(
    ("best_steps", "value"), [((None, None, None), 0.25), ((2, 2, 2), 0.5), ((2, 4, 4), 1.0)]
)
def test_score_of_a_trial_is_of_the_weights_that_it_saves(best_steps: Any, value: float, tmp_path) -> None:
    """`eval.load_best_model_at_end: false` saves the last ones, and AdaLoRA none above its budget."""
    lines = [
        {"step": 2 * place, "eval_exact_match": score, **({"best_step": best} if best else {})}
        for place, (score, best) in enumerate(zip((0.5, 1.0, 0.25), best_steps, strict=True), start=1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(worker_process.Metrics(tmp_path / "metrics.jsonl", "eval_exact_match").new())
    assert worker_process.result(tmp_path, "eval_exact_match", found) == value


def test_how_a_process_ended_says_what_the_trial_is(tmp_path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "note: x\nerror: data.name: too little (a.yaml:4:3) [out-of-memory]\n     4 |   name: a\n"
        "       |   ^\n"
        "  found:     79 GiB\n  help:      less\n"
    )
    assert worker_process.failure(Exit.TRAINING, log) == (
        "pruned",
        "exit 5: data.name: too little (a.yaml:4:3): 79 GiB",
    )
    assert (
        worker_process.failure(Exit.INPUT, log)[0]
        == worker_process.failure(Exit.ENVIRONMENT, log)[0]
        == "failed"
    )
    assert worker_process.failure(-9, log)[0] == "failed" and "SIGKILL" in worker_process.failure(-9, log)[1]
    assert worker_process.failure(Exit.STOPPED, log)[0] == "lost"
    log.write_text("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n")
    assert worker_process.failure(1, log) == ("failed", "exit 1: KeyError: 'a'")


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/a/b", "a/b/memory.events"),
        ("0::/host/only", "memory.events"),
        ("4:blkio,memory:/a", "memory/a/memory.oom_control"),
        ("4:memory:/host/only", "memory/memory.oom_control"),
    ],
)
def test_what_the_system_ended_for_memory_is_counted(line: str, file: str, tmp_path) -> None:
    own, groups = tmp_path / "own", tmp_path / "groups"
    own.write_text(f"8:pids:/x\n{line}\n")
    assert worker_process.killed_for_memory(groups, own) is None
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text("low 0\noom 4\noom_kill 3\noom_group_kill 1\n")
    assert worker_process.killed_for_memory(groups, own) == 3
    assert worker_process.killed_for_memory(groups, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("counted", "state"), [([1, 2], "pruned"), ([1, 1], "failed"), ([None, None], "failed")]
)
def test_a_trial_that_was_killed_for_memory_is_pruned(counted, state: str, tmp_path, monkeypatch) -> None:
    def dies(words: list[str], log: Path, *, cpu: bool) -> Any:
        log.write_text("")
        return Child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])

    counts = iter(counted)
    monkeypatch.setattr(worker_process, "start", dies)
    monkeypatch.setattr(worker_process, "killed_for_memory", lambda: next(counts))
    trial = worker_process.Trial([], tmp_path, tmp_path / "log")
    ended = worker_process.run(trial, "eval_loss", lambda _: "", lambda: ("", ""))
    assert ended.state == state and "SIGKILL" in ended.reason
    assert ("CPU memory ran out" in ended.reason) == (state == "pruned")


def test_a_trial_that_another_worker_took_over_is_left_to_it(tmp_path, monkeypatch) -> None:
    """A machine that slept for two minutes: its run ends, its worker says so and goes on."""
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {low: 2, high: 16}}")
    space, whole = search_space.read(tmp_path / "space.yaml"), loader.load(QUICKSTART)
    folder, url, started = tmp_path / "study", f"sqlite:///{tmp_path}/study.db", []

    def slept(words: list[str], log: Path, *, cpu: bool) -> Any:
        with study_storage.opened(url, "study") as other:
            other.tell(0, state=TrialState.FAIL)
            study_storage.take_over(other)
        (folder / "trial-0000" / "checkpoints").mkdir(parents=True)
        started.append(Child([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[0]

    monkeypatch.setattr(worker_process, "start", slept)
    monkeypatch.setattr(sweep_study, "BEAT", 0.0)
    asked = SweepRequest(str(QUICKSTART), [], tmp_path / "space.yaml", folder, 2, None, url)
    screen = Console(quiet=True)
    said: list[str] = []
    monkeypatch.setattr(screen, "say", lambda *texts: said.extend(texts))
    looked = search_space_checks.Looked(space, [], "cpu", {}, 96)
    with study_storage.opened(url, "study") as study:
        files = kept_runs.files_read(whole)
        rest = study, screen, math.inf, sweep_study.Told(), files, list[Any]()
        job = sweep_study.Search(asked, whole, space, looked, *rest)
        sweep_study.one(job)
        assert "another worker took it over" in said[-1] and started[0].poll() == -signal.SIGTERM
        assert not (folder / "trial-0000" / "checkpoints").exists() and sweep_study.begin_another(job)
        again = study.get_trials(deepcopy=False)[1]
        assert again.state == TrialState.WAITING and again.user_attrs["again"] == 0
        gone = study.ask()
        study.tell(gone.number, state=TrialState.FAIL)
        with pytest.raises(UpdateFinishedTrialError):  # however late
            study_storage.tell(study, gone, 1.0, TrialState.COMPLETE)


def test_a_broken_worker_ends_alone(tmp_path, monkeypatch) -> None:
    """Five trials that fail end their own process if none did not; others of the study go on."""
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {low: 2, high: 16}}")
    space, whole = search_space.read(tmp_path / "space.yaml"), loader.load(QUICKSTART)
    url, ended = (
        f"sqlite:///{tmp_path}/study.db",
        worker_process.Ended("failed", None, "exit 3: no GPU", 0.1, None),
    )
    asked = SweepRequest(str(QUICKSTART), [], tmp_path / "space.yaml", tmp_path, 20, None, url)
    looked = search_space_checks.Looked(space, [], "cpu", {}, 96)
    monkeypatch.setattr(worker_process, "run", lambda *_, **__: ended)
    with study_storage.opened(url, "study") as study:
        rest = asked, whole, space, looked, study, Console(quiet=True), math.inf, sweep_study.Told()
        rest = *rest, kept_runs.files_read(whole)
        broken, other = sweep_study.Search(*rest, []), sweep_study.Search(*rest, [])
        for _ in range(sweep_study.HOPELESS):
            assert sweep_study.begin_another(broken)
            sweep_study.one(broken)
        assert not sweep_study.begin_another(broken) and sweep_study.begin_another(other)
        assert broken.ran[0] and broken.ran[0].found == "exit 3: no GPU"
        sweep_study.one(other)
        ended = worker_process.Ended("pruned", None, "exit 5: out of memory", 0.1, None)
        sweep_study.one(other)
        ended = worker_process.Ended("failed", None, "exit 3: no GPU", 0.1, None)
        for _ in range(sweep_study.HOPELESS):
            sweep_study.one(other)
        assert sweep_study.begin_another(other), "one was not"


def test_a_trial_that_read_changed_files_counts_as_none(tmp_path, two_layers, monkeypatch) -> None:
    """The model is trained again between the start of the search and the end of the trial."""
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {low: 2, high: 16}}")
    model = shutil.copytree(two_layers, tmp_path / "model")
    space = search_space.read(tmp_path / "space.yaml")
    whole = loader.load(QUICKSTART, [f"model.name={model}"])
    asked = SweepRequest(
        str(QUICKSTART), [f"model.name={model}"], tmp_path / "space.yaml", tmp_path, 2, None, ""
    )
    looked = search_space_checks.Looked(space, [], "cpu", {}, 96)

    def trains(*_: object, **__: object) -> worker_process.Ended:
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\0\0\0\0")
        return worker_process.Ended("complete", 1.0, "", 0.1, None)

    monkeypatch.setattr(worker_process, "run", trains)
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "study") as study:
        told, files = sweep_study.Told(), kept_runs.files_read(whole)
        rest = study, Console(quiet=True), math.inf, told, files, list[Any]()
        with pytest.raises(UserError, match="a file that the runs read changed") as raised:
            sweep_study.one(sweep_study.Search(asked, whole, space, looked, *rest))
        assert raised.value.problems[0].code == "data-changed"
        assert [one.state for one in study.trials] == [TrialState.FAIL, TrialState.WAITING]


def test_recipe_that_changes_between_trials_ends_the_sweep(tmp_path, monkeypatch) -> None:
    """Each trial reads it again. Trials of two recipes would stand in one table."""
    recipe, text = tmp_path / "recipe.yaml", QUICKSTART.read_text().replace("../", f"{QUICKSTART.parent}/../")
    recipe.write_text(text)
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {choices: [4, 8]}}")
    space, whole = search_space.read(tmp_path / "space.yaml"), loader.load(recipe)
    asked = SweepRequest(str(recipe), [], tmp_path / "space.yaml", tmp_path, 3, None, "")
    looked = search_space_checks.Looked(space, [], "cpu", {}, 96)
    complete = worker_process.Ended("complete", 1.0, "", 0.1, None)
    monkeypatch.setattr(worker_process, "run", lambda *_, **__: complete)
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "study") as study:
        told, files = sweep_study.Told(), kept_runs.files_and_recipe(whole)
        job = sweep_study.Search(
            asked, whole, space, looked, study, Console(quiet=True), math.inf, told, files, list[Any]()
        )
        sweep_study.one(job)
        recipe.write_text(text + "\n# another one\n")
        with pytest.raises(UserError, match="a file that the runs read changed"):
            sweep_study.one(job)


def test_file_that_only_the_space_names_is_compared_between_trials(tmp_path, monkeypatch) -> None:
    data = shutil.copy(
        QUICKSTART.parent.parent / "examples/tiny_llama/data/train.jsonl", tmp_path / "b.jsonl"
    )
    (tmp_path / "space.yaml").write_text(f"space: {{data.name: {{choices: [{data}]}}}}")
    space, whole = search_space.read(tmp_path / "space.yaml"), loader.load(QUICKSTART)
    asked = SweepRequest(str(QUICKSTART), [], tmp_path / "space.yaml", tmp_path, 3, None, "")
    looked = search_space_checks.Looked(space, [], "cpu", {}, 96)
    complete = worker_process.Ended("complete", 1.0, "", 0.1, None)
    monkeypatch.setattr(worker_process, "run", lambda *_, **__: complete)
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "study") as study:
        told, files = sweep_study.Told(), kept_runs.files_read(whole)
        job = sweep_study.Search(
            asked, whole, space, looked, study, Console(quiet=True), math.inf, told, files, list[Any]()
        )
        sweep_study.one(job)
        Path(data).write_text(Path(data).read_text() + "\n")
        with pytest.raises(UserError, match="a file that the runs read changed"):
            sweep_study.one(job)


def test_a_trial_too_many_counts_as_none(tmp_path, monkeypatch) -> None:
    """Two workers asked for the last one; if the one that got it is killed, it is run again all the same."""
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {low: 2, high: 16}}")
    space, whole = search_space.read(tmp_path / "space.yaml"), loader.load(QUICKSTART)
    asked = SweepRequest(str(QUICKSTART), [], tmp_path / "space.yaml", tmp_path, 2, None, "")
    looked, ran = search_space_checks.Looked(space, [], "cpu", {}, 96), list[str]()
    complete = worker_process.Ended("complete", 1.0, "", 0.1, None)
    monkeypatch.setattr(
        worker_process, "run", lambda trial, *_, **__: ran.append(trial.folder.name) or complete
    )
    with study_storage.opened(f"sqlite:///{tmp_path}/study.db", "study") as study:
        told, files = sweep_study.Told(), kept_runs.files_read(whole)
        rest = whole, space, looked, study, Console(quiet=True), math.inf, told, files, list[Any]()
        job = sweep_study.Search(asked, *rest)
        sweep_study.one(job)
        study.ask().set_user_attr("worker", f"{platform.node()} 1 -3600.00")  # of a process that is gone
        sweep_study.one(job)
        for most in (2, 4):
            job = sweep_study.Search(asked._replace(trials=most), *rest)
            while sweep_study.begin_another(job):
                sweep_study.one(job)
            assert len(ran) == most
        assert [row["state"] for row in sweep_report.trials(study)].count("complete") == 4


def test_a_trial_is_ended_whatever_it_does(monkeypatch) -> None:
    """SIGTERM, again, and then it is killed."""
    monkeypatch.setattr(worker_process, "AGAIN_AFTER", 0.3)
    monkeypatch.setattr(worker_process, "KILL_AFTER", 0.3)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process: Any = Child([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout.readline()
    worker_process.end(process)
    assert process.exitcode == -signal.SIGKILL
    process.stdout.close()


@pytest.mark.parametrize(
    "number", soak_except([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
)
def test_a_final_run_is_told_to_end_with_its_study(number: int, tmp_path) -> None:
    """Ctrl-C is for the study alone, which hands it on once and waits for what is saved; exit 75."""
    saves = "import os, pathlib, signal, sys, time\n"
    saves += f"here = pathlib.Path({str(tmp_path)!r})\n"
    saves += "signal.signal(15, lambda *_: (time.sleep(1), (here / 'saved').touch(), os._exit(75)))\n"
    saves += "(here / 'pid').write_text(str(os.getpid()))\n(here / 'runs').touch()\ntime.sleep(60)"
    code = "import argparse, pathlib, subprocess, sys; from finetune.cli import main\n"
    code += "from finetune.experiments.sweep import study\n"
    code += "from finetune.experiments.sweep.search_space_checks import SweepRequest\n"
    code += f"sys.executable = {str(tmp_path / 'python')!r}\n"
    code += f"folder = pathlib.Path({str(tmp_path)!r})\n"
    code += "asked = SweepRequest('a.yaml', [], pathlib.Path('s'), folder, 1, None, '')\n"
    code += "sys.exit(main.guarded(lambda _: study.final(asked), argparse.Namespace(debug=False)).code)"
    (tmp_path / "saves.py").write_text(saves)
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/saves.py\n")
    (tmp_path / "python").chmod(0o755)
    command = [sys.executable, "-c", code]
    ends: dict[str, Any] = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    study = subprocess.Popen(command, start_new_session=True, **ends)
    deadline = time.monotonic() + 20
    while not (tmp_path / "runs").exists():
        assert study.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    run = psutil.Process(int((tmp_path / "pid").read_text()))
    os.killpg(study.pid, number)
    said = study.communicate(timeout=30)[1]
    while run.is_running() and run.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "saved").exists()
    if number != signal.SIGKILL:
        assert study.returncode == Exit.STOPPED and "run the same command again" in said


WAITS = {
    "spawned": "p = subprocess.Popen(['sleep', '60'], preexec_fn=worker_process.tie)",
    "forked": "l = here / 'l'\n"
    "p = worker_process.start([f'{here}/pipe'], l, cpu=True)\nwhile not l.exists(): pass",
}


@pytest.mark.parametrize("how", soak_except(["spawned"], WAITS))
def test_a_run_ends_with_its_study(how: str, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")  # a recipe that a run waits for
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    code = "import pathlib, subprocess, time; from finetune.experiments.runner import worker_process\n"
    code += f"here = pathlib.Path({str(tmp_path)!r})\n{WAITS[how]}\n"
    code += "print(p.pid, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout
    child = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.close(writer)


def test_the_process_of_a_study_holds_no_torch() -> None:
    """Trials and the look at recipe and space have processes of their own."""
    code = "import sys; from finetune.experiments.sweep import study; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
