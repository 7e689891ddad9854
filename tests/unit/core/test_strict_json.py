"""eval.json of a model whose losses are not numbers: JSON to every reader, and numbers to ours."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.core import strict_json
from finetune.data.examples import Example
from finetune.evaluation import results, verdicts
from finetune.evaluation.results import Measured
from finetune.evaluation.scoring import Score
from finetune.experiments.runner import worker_process
from finetune.export import staged_files
from finetune.recipe.schema import Eval
from finetune.reporting import html_report
from finetune.run_folder.run_folder import RunFolder


def refused(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of a run whose weights became NaN after they were saved; one row's source is called nan."""
    rows: Any = [SimpleNamespace(example=Example("nan:1", prompt="2+2", completion="inf"))] * 8
    before = Score([1.0] * 8, [2] * 8, ["nan"] * 8, [False] * 8, [True] * 8)
    after = Score([math.nan] * 7 + [math.inf], [2] * 8, ["inf"] * 8, [True] * 8, [True] * 8)
    sides = [Measured(score, None, {}, 1.0) for score in (before, after)]
    found = results.content(rows, *sides, Eval(), [])
    found["verdict"] = verdicts.verdict(found)
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    folder.write("eval.json", found)
    return folder


def test_the_file_is_json(lost: RunFolder) -> None:
    found = json.loads((lost.path / "eval.json").read_text(), parse_constant=refused)
    assert found["tuned"]["loss"] == "nan" and found["difference"]["loss"]["value"] == "nan"


def test_numbers_are_read_back_and_texts_stay(lost: RunFolder) -> None:
    found = lost.read("eval.json")
    assert math.isnan(found["tuned"]["loss"]) and found["base"]["loss"] == 0.5
    assert math.isnan(found["difference"]["loss"]["low"])
    assert found["sources"][0]["source"] == "nan" and math.isnan(found["sources"][0]["tuned"]["loss"])
    assert (found["samples"][0]["reference"], found["samples"][0]["base"]) == ("inf", "nan")
    assert {str(row["tuned_loss"]) for row in found["worst"]} == {"nan", "inf"}
    assert all(type(row["tuned_loss"]) is float and row["tuned"] == "inf" for row in found["worst"])
    assert verdicts.verdict(found) == found["verdict"] and "nan" in found["verdict"]["why"]


def test_readers_take_it(lost: RunFolder, tmp_path: Path) -> None:
    page, _ = html_report.run(lost.path)
    text = page.read_text()
    assert ">nan<" in text and "worse" in text and "finetune can't read" not in text
    assert math.isnan(lost.found("eval.json")["tuned"]["loss"])
    assert math.isnan(worker_process.result(lost.path, "eval_loss", []))
    staged = tmp_path / "eval.json"
    staged_files.write_json(staged, {"tuned": {"loss": math.nan}}, indent=1)  # of a run that wrote NaN itself
    assert json.loads(staged.read_text(), parse_constant=refused) == {"tuned": {"loss": "nan"}}


def test_nothing_else_changes() -> None:
    content = {"a": [1, 0.5, None, (2,), {"b": -math.inf}], "base": {"loss": 1e-3, "name": "information"}}
    spelt = strict_json.spelt(content)
    assert spelt == {"a": [1, 0.5, None, [2], {"b": "-inf"}], "base": content["base"]}
    assert strict_json.scores(spelt) == spelt
