"""A fixed quarter of the fuzzed recipes of `make soak` (benchmarks/fuzz.py)."""

import sys

import pytest

from finetune.core.errors import UserError
from finetune.recipe import loader
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import fuzz

from support.soak import soak_except

SEEDS, PARTS = 2500, 5


@pytest.mark.parametrize("part", soak_except([0], range(PARTS)))
def test_a_fuzzed_recipe_is_valid_or_refused_with_its_places(part: int, tmp_path) -> None:
    found = fuzz.run(range(part, SEEDS, PARTS), tmp_path)
    summary = fuzz.summary(found)
    assert not summary["wrong"]
    assert summary["valid"] > 50 and summary["cases"] == SEEDS // PARTS, "some of each kind"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("adapter: text\nfoo: 1\nmodel: {name: a, x: 1}\n", ":3:18"),
        ("adapter: text\nmodel: {name: a}\ndata: {name: a.jsonl}\n", ":1:1"),
        ("adapter: {type: {a: 1}}\n", ":1:11"),
        ("train: {seed: 0x" + "f" * 9999 + "}\n", ":1:9"),
        (
            "adapter: {type: prompt_tuning, modules_to_save: 0.5}\nmodel: {add_tokens: [a], name: b}\n",
            ":1:32",
        ),
    ],
)
def test_what_fuzzing_found_stays_mended(text: str, place: str, tmp_path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError) as raised:
        loader.load(tmp_path / "a.yaml")
    assert any(problem.where.endswith(place) for problem in raised.value.problems), str(raised.value)
    assert all(problem.where for problem in raised.value.problems)
