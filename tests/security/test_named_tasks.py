"""lm-eval's own tasks, by name: no script runs, and no folder of the working directory is read."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import lm_eval
import pytest

from finetune.core.errors import UserError
from finetune.evaluation import lm_eval_harness, task_guard
from finetune.recipe.schema import Eval

TASKS = Path(lm_eval.__file__).parent / "tasks"
PLAIN, PROGRAMS = {"exec", "eval", "Popen"}, "system|popen|Popen|check_output|run|call|exec.*"
SYMPY = {"parse_expr", "sympify"}  # functions that call `eval`
SCRIPT = "open('PWNED', 'w')\nclass M: pass\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["baber/piqa", "race"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_name_of_a_dataset_is_no_folder_of_the_working_directory(name: str, kind: str, here: Path) -> None:
    (here / name).parent.mkdir(exist_ok=True)
    if kind == "folder":
        (here / name).mkdir()
        (here / name / "test.jsonl").write_text('{"goal": "g"}\n')
    elif kind == "file":
        (here / name).write_text("")
    else:
        (here / name).symlink_to(here)
    load = datasets.load_dataset
    with task_guard.guarded(), pytest.raises(UserError, match="name of a task's dataset"):
        datasets.load_dataset(name)
    assert datasets.load_dataset is load


def test_readers_of_datasets_still_read(here: Path) -> None:
    (here / "json").mkdir()
    (here / "a.jsonl").write_text('{"goal": "g"}\n')
    with task_guard.guarded():
        rows = datasets.load_dataset("json", data_files=str(here / "a.jsonl"), split="train")
    assert rows[0] == {"goal": "g"}


@pytest.mark.parametrize("imported", [True, False])
def test_script_of_evaluate_does_not_run(imported: bool, here: Path, monkeypatch) -> None:
    (here / "rouge").mkdir()
    (here / "rouge" / "rouge.py").write_text(SCRIPT)
    before = type(sys)("evaluate")
    monkeypatch.setitem(sys.modules, "evaluate", before) if imported else sys.modules.pop("evaluate", None)
    from lm_eval.api import registry

    with task_guard.guarded():
        import evaluate

        with pytest.raises(UserError, match="metric script `rouge`"):
            evaluate.load("rouge")
        assert registry.get_metric("rouge") is None
    assert sys.modules.get("evaluate") is (before if imported else None)
    assert not (here / "PWNED").exists()


def test_command_refuses_a_task_that_needs_a_script(here: Path) -> None:
    """The code of `humaneval` loads the script when lm-eval imports it."""
    (here / "code_eval").mkdir()
    (here / "code_eval" / "code_eval.py").write_text(SCRIPT)
    with pytest.raises(UserError, match="metric script `code_eval`"):
        lm_eval_harness.check(Eval(tasks=["humaneval"]))
    assert not (here / "PWNED").exists()


def metrics_of(module: str, *names: str) -> Any:
    """A loaded task whose configuration names functions of a module, as lm-eval reads them."""
    with task_guard.guarded():
        functions = [getattr(importlib.import_module(module), name) for name in names]
    listed = [{"metric": "m", "aggregation": function} for function in functions]
    return SimpleNamespace(config=SimpleNamespace(metric_list=listed, doc_to_text="{{ a }}"))


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [(("rouge1_agg",), True), (("exact", "rouge1_agg"), True), (("exact", "process_docs"), False)],
)
def test_task_that_loads_a_script_for_its_scores_is_refused_before_the_evaluation(
    names: tuple[str, ...], is_refused: bool
) -> None:
    """The function loads the script when it is called, after the training."""
    task = metrics_of("lm_eval.tasks.french_bench.utils", *names)
    with pytest.raises(UserError, match="needs a metric script") if is_refused else contextlib.nullcontext():
        task_guard.check_code("task", task)


def test_task_with_its_own_class_is_searched_too() -> None:
    """squadv2: a method names a function, which calls another one that imports the package."""
    with task_guard.guarded():
        kind = importlib.import_module("lm_eval.tasks.squadv2.task").SQuAD2
    task = kind.__new__(kind)
    task._config = SimpleNamespace()
    with pytest.raises(UserError, match="the task `squadv2` needs a metric script"):
        task_guard.check_code("squadv2", task)


def test_refusal_that_the_code_of_a_task_hides_is_shown() -> None:
    """The code of meddialog raises a RuntimeError in place of every other error."""

    def fails(_: object) -> None:
        importlib.import_module("lm_eval.tasks.meddialog.utils")

    manager: Any = SimpleNamespace(all_tasks=[], load=fails)
    with task_guard.guarded(), pytest.raises(UserError, match="metric script `bleu`"):
        task_guard.load(manager, [])


def test_each_task_that_runs_code_is_known() -> None:
    """A new version of lm-eval may bring more: read their code, and add them to RUN_CODE."""
    found = {path for path in TASKS.rglob("*.py") if runs_code(path.read_text(encoding="utf-8"))}
    assert {str(path.relative_to(TASKS)) for path in found} == {
        "cruxeval/utils.py",
        "longproc/metrics.py",
        "noreval/ask_gec/errant.py",
        "score/math/math_grader.py",
    }
    names = {name for folder in {path.parent for path in found} for name in stated(folder)}
    safe = re.compile("longproc(_(travel_planning|tom_tracking|path_traversal|html_to_tsv).*)?")
    left = {name for name in names if not task_guard.RUN_CODE.fullmatch(name) and not safe.fullmatch(name)}
    assert left == {"longproc_pseudo_to_code_0.5k", "longproc_pseudo_to_code_2k"}  # `unsafe_code: true`


def test_task_that_asks_addresses_of_its_dataset_is_refused() -> None:
    users = {
        path.parent for path in TASKS.rglob("*.py") if "import jsonschema" in path.read_text(encoding="utf-8")
    }
    users |= {
        path.parent for path in TASKS.rglob("*.py") if "from jsonschema" in path.read_text(encoding="utf-8")
    }
    names = {name for folder in users for name in stated(folder)}
    assert names and all(map(task_guard.FETCH.fullmatch, names)), names
    task: Any = SimpleNamespace(config=SimpleNamespace())
    with pytest.raises(UserError, match="is not allowed"):
        task_guard.check_code(min(names), task)


def test_task_whose_package_opens_a_pickle_is_refused() -> None:
    names = {
        name
        for path in TASKS.rglob("*.py")
        if "import tinyBenchmarks" in path.read_text(encoding="utf-8")
        for name in stated(path.parent)
    }
    assert names and all(map(task_guard.PICKLE.fullmatch, names)), names
    task: Any = SimpleNamespace(config=SimpleNamespace())
    for name in names:
        with pytest.raises(UserError, match="opens a pickle"):
            task_guard.check_code(name, task)


def runs_code(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in their docstrings
        tree = ast.parse(source)
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    used = imported | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(calls & PLAIN or used & SYMPY) or any(
        re.fullmatch(f"(os|subprocess)\\.({PROGRAMS})", name) for name in calls
    )


def stated(folder: Path) -> set[str]:
    """The names of tasks in the files of a folder."""
    lines = (line for path in folder.glob("*.yaml") for line in path.read_text().splitlines())
    return {line.partition(":")[2].strip() for line in lines if re.match(r"task: *\w", line)}
