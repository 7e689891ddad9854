"""The weights of several sources: what an epoch uses is counted, and nothing is left out in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data import preparation, preview
from finetune.data.audit import Report
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.preflight import checker
from finetune.recipe import loader
from support.paths import QUICKSTART


def recipe(folder: Path, weight: float, rows: int = 20) -> Any:
    for name, count in (("a", 40), ("b", rows)):
        chats = [
            [{"role": "user", "content": f"{name} {i}"}, {"role": "assistant", "content": f"yes {i}"}]
            for i in range(count)
        ]
        text = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
        (folder / f"{name}.jsonl").write_text(text)
    sources = f"[{{name: {folder}/a.jsonl}}, {{name: {folder}/b.jsonl, weight: {weight}}}]"
    given = [f"data.name={sources}", "data.validation=null", "train.max_steps=1"]
    return loader.load(
        QUICKSTART, [*given, f"data.cache_dir={folder}/cache", f"train.output_dir={folder}/run"]
    )


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("weight", [0.3, 0.5, 1, 1.5, 2])
def test_tokens_that_an_epoch_uses_are_counted(weight: float, packing: bool, tmp_path) -> None:
    data = recipe(tmp_path, weight).data.model_copy(update={"packing": packing})
    prepared = preparation.prepare(data, load_tokenizer(recipe(tmp_path, weight).model), 7, None)
    report = prepared.report["train"]
    ids = [row["input_ids"] for row in prepared.train]
    one, other = (report.mix[f"{tmp_path}/{name}.jsonl"] for name in "ab")
    assert one["used_tokens"] == one["tokens"]
    assert sum(map(len, ids)) == one["used_tokens"] + other["used_tokens"]
    shares = {name: part for name, part, _ in preview.mix(report)}
    assert shares[f"{tmp_path}/b.jsonl"] == other["used_tokens"] / sum(map(len, ids))
    said = [remark for remark in report.remarks() if "the run uses" in remark]
    assert len(said) == (weight < 1), said


def test_command_names_the_part_that_it_uses(tmp_path, capsys) -> None:
    used = recipe(tmp_path, 0.5)
    assert main.main(["data", str(QUICKSTART), f"data.name={as_yaml(used)}", "data.validation=null"]) == 0
    text = capsys.readouterr().out
    assert "the same in each epoch (weight 0.5)" in text and "without a change" not in text


@pytest.mark.parametrize("rows", [1, 20])
def test_weight_that_leaves_nothing_of_a_source_is_refused(rows: int, tmp_path) -> None:
    refused = recipe(tmp_path, 1e-9, rows)
    tokenizer = load_tokenizer(refused.model)
    for command in (
        lambda: checker.check(refused),
        lambda: preparation.prepare(refused.data, tokenizer, 7, None),
    ):
        with pytest.raises(UserError, match="the run uses none of its examples"):
            command()


def test_report_of_an_older_run_has_shares() -> None:
    counts = {"weight": 0.5, "rows": 2, "tokens": 30}
    report = Report(mix={"a": counts, "b": {**counts, "weight": 1.0}})
    assert [part for _, part, _ in preview.mix(report)] == [1 / 3, 2 / 3]


def as_yaml(recipe: Any) -> str:
    return json.dumps([{"name": one.name, "weight": one.weight} for one in recipe.data.name])
