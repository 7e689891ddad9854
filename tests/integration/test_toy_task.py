"""Every kind of adapter learns a task the base can't do; with a learning rate of nothing, none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.soak import soak_except

KINDS = {"lora": 5e-3, "qlora": 5e-3, "dora": 5e-3, "adalora": 3e-2, "ia3": 1e-1, "full": 1e-3}
STEPS = {"adalora": 36}  # it has ranks to lose on the way
NOTHING = 1e-9
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def rows(*ways: str) -> str:
    """What follows a number, asked in each of these ways."""
    pairs = [(way.format(word), WORDS[(at + 1) % 10]) for way in ways for at, word in enumerate(WORDS)]
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    return "".join(json.dumps({"messages": each}) + "\n" for each in turns)


@pytest.mark.parametrize(
    ("kind", "rate"),
    soak_except(
        [("lora", KINDS["lora"])],
        [*KINDS.items(), ("lora", NOTHING), ("full", NOTHING)],
    ),
)
def test_it_counts_on_where_there_is_a_learning_rate(kind: str, rate: float, train, tmp_path: Path) -> None:
    """Exact answers have every token right, the end of the turn too."""
    (tmp_path / "train.jsonl").write_text(rows("{}", "after {}"))
    (tmp_path / "test.jsonl").write_text(rows("after {}"))
    run = train(
        f"adapter.type={kind}",
        f"train.learning_rate={rate}",
        "model.name=examples/tiny_llama/model",
        f"data.name={tmp_path / 'train.jsonl'}",
        f"data.validation={tmp_path / 'test.jsonl'}",
        "data.expect.in_validation=1",
        f"train.max_steps={STEPS.get(kind, 24)}",
        "train.warmup_steps=4",
        "train.logging_steps=12",
        "train.effective_batch_size=8",
        "eval.max_new_tokens=5",
        "eval.samples=0",
    )
    scores = run.read("eval.json")
    assert scores["base"]["exact_match"] == 0.0
    if rate == NOTHING:
        assert scores["tuned"]["exact_match"] == 0.0
        assert scores["tuned"]["loss"] == pytest.approx(scores["base"]["loss"], rel=1e-3)
    else:
        assert (scores["tuned"]["exact_match"], scores["tuned"]["ended"]) == (1.0, 1.0)
        assert scores["tuned"]["loss"] < 0.1
