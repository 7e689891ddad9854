"""Errors that are raised together stand in the order of their lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.cli import main
from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RECIPE = """\
model:
  name: examples/tiny_llama/model
data:
  name: examples/tiny_llama/data/train.jsonl
  max_lenght: 128
adapter:
  type: lorra
train:
  learning_rate: fast
"""


def test_errors_are_ordered_by_file_and_line_then_those_without_a_line() -> None:
    places = ["", "b.yaml:10:1", "a.yaml:3:1", "override x=1", "b.yaml:9:5", "b.yaml:9:2"]
    error = UserError(*(Problem(f"problem {place}", where=place) for place in places))
    order = ["b.yaml:9:2", "b.yaml:9:5", "b.yaml:10:1", "a.yaml:3:1", "", "override x=1"]
    assert [problem.where for problem in error.problems] == order


def test_check_prints_errors_by_line_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(RECIPE)
    assert main.main(["check", str(recipe)]) == 2
    printed = capsys.readouterr().err.splitlines()
    keys = [line.split(":")[1].strip() for line in printed if line.startswith("error:")]
    assert keys == ["data.max_lenght", "adapter.type", "train.learning_rate"]
    assert printed[-1].endswith("explain unknown-key"), "the code of the first error"
