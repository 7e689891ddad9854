"""What a plan says of rows that are not prepared: how many, how long, and what becomes of those too long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import planned

from finetune import plan_changes, plan_rows, recipe
from finetune.sections import Data


def test_rows_are_counted_and_steps_follow(large) -> None:
    made = planned(large, "train.max_steps=null", "train.num_train_epochs=2")
    assert made.steps == 2 * 3 and made.row_tokens == pytest.approx(2500, rel=0.01)  # 9 rows, 4 a step
    packed = planned(large, "data.packing=true")
    assert packed.row_tokens == 4096 and packed.choices["attention"].value in ("varlen", "flex_attention")


@pytest.fixture
def tall(large: Path) -> Path:
    """The recipe on 40 rows of 4,000 characters, every other one twice as long."""
    lines = [json.dumps({"text": "w" * 4 * (1000 + 1000 * (n % 2))}) for n in range(40)]
    (large.parent / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return large


def test_no_change_drops_more_rows_than_a_run_lets_pass(large) -> None:
    """Rows of 2,500 tokens: half of max_length would drop each of them."""
    slow = ["speed.base=bf16", "speed.recompute=all"]
    now, loaded = planned(large, *slow), recipe.load(large, slow)
    offered = [change.overrides for change in plan_changes.changes(loaded, slow, now)]
    assert ("data.max_length=2048",) in [given for given, _ in plan_changes.candidates(loaded, now)]
    assert offered and ("data.max_length=2048",) not in offered
    made = planned(large, *slow, "data.max_length=2048")
    assert made.refused and "100% of the rows are longer than data.max_length (2048)" in made.refused
    assert plan_changes.headline(loaded, made).count("a run would refuse its rows") == 1
    assert not now.refused


@pytest.mark.parametrize(
    ("too_long", "rows", "tokens", "refused"),
    [
        ("drop", 20, 1000, True),
        ("truncate_prompt", 40, 1250, False),
        ("split", 60, 1000, False),
        ("error", 20, 1000, True),
    ],
)
def test_rows_that_are_too_long_count_as_a_run_treats_them(
    tall: Path, too_long: str, rows: int, tokens: int, refused: bool
) -> None:
    data = Data(name=str(tall.parent / "rows.jsonl"), max_length=1500, too_long=too_long)  # pyright: ignore
    found = plan_rows.rows_of(data, 1)
    assert found and found.long == 0.5
    assert (found.number, round(found.tokens)) == (rows, tokens)
    said, no = plan_rows.too_long(found, data)
    assert no is refused and said.startswith("50% of the rows are longer than data.max_length (1500)")


def test_packed_rows_are_made_of_those_that_are_kept(tall) -> None:
    name = str(tall.parent / "rows.jsonl")
    data = Data(name=name, max_length=1500, packing=True, expect={"dropped": 0.6})  # pyright: ignore
    found = plan_rows.rows_of(data, 1)
    assert found and found.number == round(20 * 1000 / 1500)
    assert plan_rows.too_long(found, data)[1] is False
