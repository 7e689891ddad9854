"""A value that is written as other tools write it is an error that names the value here."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from finetune.core.errors import UserError
from finetune.recipe import build, renames
from support.paths import QUICKSTART

CASES = [(key, said, means) for key, table in renames.MEANT.items() for said, means in table.items()]
OF_CHECK = ("train.report_to",)  # `check` knows the trackers, the schema does not
NEEDS_MORE = {
    "warmup_stable_decay": {"train.lr_scheduler_kwargs": {"num_decay_steps": 5}},
    "all": {"speed.activation_checkpointing": "auto"},
}


def recipe(changes: dict[str, Any]) -> Any:
    raw = yaml.safe_load(QUICKSTART.read_text())
    for key, value in changes.items():
        section, _, name = key.partition(".")
        raw.setdefault(section, {})[name] = value
    return raw


def problems(tmp_path, changes: dict[str, Any]) -> list[Any]:
    from finetune.recipe import loader

    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe(changes)))
    try:
        loader.load(path)
    except UserError as error:
        return [problem for problem in error.problems if problem.key in changes]
    return []


@pytest.mark.parametrize(("key", "said", "means"), CASES, ids=lambda value: str(value))
def test_value_of_another_tool_is_answered_with_the_value_here(
    key: str, said: str, means: str, tmp_path
) -> None:
    assert renames.meant(key, said, ()) == means
    if key in OF_CHECK:
        return
    found = problems(tmp_path, {key: said})
    assert not found or any(problem.fix.endswith(f": {means}") for problem in found), found
    value = means if means == "no" else yaml.safe_load(means)
    more = {
        **NEEDS_MORE.get(means, {}),
        **({"eval.eval_steps": 5, "data.validation_fraction": 0.1} if key.startswith("eval.") else {}),
    }
    assert not problems(tmp_path, {key: value, **more})


@pytest.mark.parametrize(
    ("key", "said", "means"),
    [
        ("model.quantization", "4-bit", "nf4"),
        ("model.quantization", "int4", "nf4"),  # not int8, the likest in letters
        ("speed.activation_checkpointing", "on", "full"),  # not none
        ("model.attention", "paged", "sdpa"),  # not eager
        ("model.attention", "FlashAttention-2", "flash_attention_2"),
        ("model.quantization", "NF4", "nf4"),
        ("model.quantization", True, "nf4"),
    ],
)
def test_meaning_comes_before_likeness(key: str, said: object, means: str, tmp_path) -> None:
    (problem,) = problems(tmp_path, {key: said})
    assert problem.fix.endswith(f": {means}") and problem.code == "value-choice"


def test_keys_of_the_table_are_keys_of_a_recipe() -> None:
    known = build.known_keys()
    for key in renames.MEANT:
        section, _, name = key.partition(".")
        assert section == "adapter" or name in known[section], key
