"""`check` refuses the files of a tokenizer exactly if `data` and `train` refuse them.

`check` reads tokenizer.json without transformers, which may build another tokenizer from the same files.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import UserError
from finetune.preflight import checker
from finetune.recipe import loader
from finetune.training import load_data
from support.odd_tokenizers import CASES, write_model
from support.paths import QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune.recipe.schema import Recipe

FAST: list[Any] = [  # each of them had another verdict in `check`, or ended in a traceback
    ("settings", "eos_token", ""), ("settings", "eos_token", 2), ("settings", "tokenizer_class", 5),
    ("settings", "tokenizer_class", "BertTokenizer"),
    ("settings", "padding_side", "both"), ("settings", "extra_special_tokens", 5),
    ("settings", "split_special_tokens", True), ("file", "special_tokens_map.json", "["),
    ("template", "", 5), ("settings", "tokenizer_class", "GemmaTokenizerFast"),
]  # fmt: skip
FAST += [case for case in CASES if case[:2] == ("part", "normalizer") or case[:2] == ("added", "9000")]


def refusal(ask: Callable[[Recipe], object], recipe: Recipe) -> str:
    try:
        ask(recipe)
    except UserError as error:
        return f"{error.problems[0].what} [{error.problems[0].found}]"
    return ""


@pytest.mark.parametrize("case", soak_except(FAST, [(case,) for case in CASES]), ids=str)
def test_check_of_an_odd_tokenizer_gives_the_verdict_of_data(
    case: tuple[str, str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "model", case)
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Answer."}]
    rows = [
        {"messages": [*turns, {"role": "user", "content": f"{number}?"}, turns[1]]} for number in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = {
        "model.name": tmp_path / "model", "data.name": tmp_path / "rows.jsonl", "data.validation": "null",
        "data.cache_dir": tmp_path / "cache", "train.effective_batch_size": 2, "train.output_dir": "null",
        "eval.forgetting": "false", "eval.generate": "false",
    }  # fmt: skip
    recipe = loader.load(QUICKSTART, [f"{key}={value}" for key, value in given.items()])
    checked, prepared = refusal(checker.check, recipe), refusal(load_data.prepare_data, recipe)
    assert bool(checked) == bool(prepared), f"check: {checked or 'accepts'}\ndata: {prepared or 'accepts'}"
