"""`check`, `data` and `train` give one verdict and one count of small datasets, however these are split."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune.autoconfig import batch_size
from finetune.core.errors import UserError
from finetune.data import preparation
from finetune.data.example_errors import FIRST
from finetune.preflight import checker, token_checks
from finetune.recipe import loader
from finetune.training import load_data
from support.paths import QUICKSTART

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune.recipe.schema import Recipe

LONG = "It was a long way from the village to the sea. " * 40


def chat(asked: str, said: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": turns, **more}


GOOD = [chat(f"Question {number}?", f"Answer {number}.") for number in range(24)]
ALLOWED = {"data.expect": {"malformed": 0.5, "unreadable": 0.5, "dropped": 0.5, "role_order": 0.5}}
DATASETS: dict[str, list[Any]] = {
    "good": GOOD,
    "few": GOOD[:5],
    "one": GOOD[:1],
    "repeated": [*GOOD[:6], *GOOD[:6], *GOOD[:6]],
    "all the same": GOOD[:1] * 24,
    "conversations": [chat(f"Hello {number // 6}", f"Answer {number}.") for number in range(24)],
    "ids": [chat(f"Question {n}?", f"Answer {n}.", id=n // 8) for n in range(24)],
    "one conversation": [chat("Hello", f"Answer {number}.") for number in range(24)],
    "malformed": [*GOOD, *[{"messages": 5}] * 8],
    "unreadable": [*GOOD, *["{"] * 8],
    "no answer": [*GOOD[:12], *({"messages": row["messages"][:1]} for row in GOOD[12:])],
    "too long": [*GOOD, *(chat(f"{LONG} {number}?", "Yes.") for number in range(8))],
    "texts": [{"text": f"This is text {number}."} for number in range(24)],
    "empty prompts": [{"prompt": "", "completion": f"This is text {number}."} for number in range(24)],
    "mixed": [*GOOD[:12], *({"prompt": f"{n}?", "completion": f"{n}!"} for n in range(12))],
}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tenth": {"data.validation_fraction": 0.1},
    "half": {"data.validation_fraction": 0.5},
    "file": {"data.validation": "HERE/held.jsonl"},
    "shared": {"data.validation": "HERE/shared.jsonl"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "allowed": ALLOWED,
    "packed": {"data.packing": True, "data.max_length": 128, **ALLOWED},
    "cut": {"data.too_long": "truncate_prompt", "data.max_length": 64, "eval.generate": True},
    "all": {"data.train_on": "all", "eval.generate": True, "eval.max_new_tokens": 490},
    "streamed": {"data.streaming": True, **ALLOWED},
    "exact match": {"eval.eval_steps": 1, "eval.metric_for_best_model": "exact_match"},
    "large batch": {"train.effective_batch_size": 12, "data.expect": {"duplicates": 1.0}},
    "weighted": {"data.name": [{"name": "HERE/rows.jsonl", "weight": 0.3}]},
}
CELLS = list(itertools.product(DATASETS, SPLITS, OPTIONS))
SAMPLE = CELLS[::41]  # in CI; `make soak` takes all


def recipe_of(cell: tuple[str, str, str], folder: Path, model: Path) -> Recipe | None:
    """The recipe of a cell; `None`: it is refused before a file is read."""
    rows, split, option = cell
    lines = [row if isinstance(row, str) else json.dumps(row) for row in DATASETS[rows]]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    held_out = [chat(f"Held {number}?", "So it is.") for number in range(4)]
    for name, examples in (("held", held_out), ("shared", [*held_out, chat("Hello", "Sure."), *GOOD[:2]])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    asked = {
        "model.name": str(model), "data.name": "HERE/rows.jsonl", "data.validation": None,
        "data.cache_dir": "HERE/cache", "train.effective_batch_size": 4, "train.max_steps": 2,
        "train.warmup_steps": 0, "train.output_dir": "HERE/run", "eval.forgetting": False,
        "eval.generate": False, **SPLITS[split], **OPTIONS[option],
    }  # fmt: skip
    given = [f"{key}={json.dumps(value)}".replace("HERE", str(folder)) for key, value in asked.items()]
    try:
        return loader.load(QUICKSTART, given)
    except UserError:
        return None


def refusal(ask: Callable[[Recipe], object], recipe: Recipe) -> str:
    """The first problem that a command names; empty: it accepts."""
    try:
        ask(recipe)
    except UserError as error:
        return f"{error.problems[0].key}: {error.problems[0].what}"  # a stream's places are bytes, not lines
    return ""


def prepare(recipe: Recipe) -> dict[str, Any]:
    """What `data` and `train` do with the examples before a weight loads: the reports."""
    _, prepared = load_data.prepare_data(recipe)
    rows = None if recipe.data.streaming else len(prepared.train)
    batch_size.count_steps(recipe.train, rows, batch_size.split_batch(recipe.train, 1), 1)
    return prepared.report


def counted(report: Any) -> dict[str, Any]:
    return {name: getattr(report, name) for name in ("rows", "kept", "tokens", "counts", "longest_prompt")}


def first_of(recipe: Recipe) -> preparation.First:
    tokens = token_checks.load_model_tokens(recipe)
    return preparation.check_first(
        recipe.data, tokens.tokenizer, recipe.train.seed, tokens.rows, tokens.ends, FIRST
    )


def disagreements(cells: list[tuple[str, str, str]], folder: Path, model: Path) -> list[str]:
    """Each cell that `check` refuses in other words than `data`, or counts in another way."""
    found = []
    for number, cell in enumerate(cells):
        (place := folder / str(number)).mkdir()
        recipe = recipe_of(cell, place, model)
        if recipe is None:
            continue
        checked, prepared = refusal(checker.check, recipe), refusal(prepare, recipe)
        if checked != prepared:
            found.append(f"{cell}\n  check: {checked or 'accepts'}\n  data: {prepared or 'accepts'}")
        elif not prepared:
            reports, first = prepare(recipe), first_of(recipe)
            for name, audit in (("train", first.train), ("validation", first.validation)):
                if counted(audit.report) != counted(reports[name]):
                    found.append(f"{cell}: {name}: {counted(audit.report)} and {counted(reports[name])}")
    return found


def test_check_and_data_agree_on_sampled_datasets(tmp_path: Path, two_layers: Path) -> None:
    assert "\n".join(disagreements(SAMPLE, tmp_path, two_layers)) == ""


@pytest.mark.soak
@pytest.mark.parametrize("rows", DATASETS)
def test_check_and_data_agree_on_every_dataset(rows: str, tmp_path: Path, two_layers: Path) -> None:
    cells = [cell for cell in CELLS if cell[0] == rows]
    assert "\n".join(disagreements(cells, tmp_path, two_layers)) == ""
