"""Old names of recipe keys and values: an error that names today's, in a file and on the command line."""

from __future__ import annotations

import pytest

from finetune.core.errors import UserError
from finetune.recipe import loader, renames
from finetune.recipe.build import known_keys
from support.paths import QUICKSTART


@pytest.mark.parametrize("key", renames.KEYS)
def test_old_key_is_an_error_that_names_the_new_one(key: str, recipe_file) -> None:
    with pytest.raises(UserError) as raised:
        loader.load(QUICKSTART, [f"{key}=1"])
    (problem,) = raised.value.problems
    assert problem.key == key and problem.fix.startswith(f"{renames.KEYS[key]}: ")
    section, _, name = key.partition(".")
    text = {"model": "name: '{model}'", "data": "name: '{data}'", "adapter": "type: lora"}
    text[section] = f"{text[section]}, {name}: 1" if section in text else f"{name}: 1"
    path = recipe_file("\n".join(f"{one}: {{{keys}}}" for one, keys in text.items()))
    with pytest.raises(UserError, match="has a new name") as raised:
        loader.load(path)
    assert str(path) in raised.value.problems[0].where


def test_new_keys_are_keys_and_old_ones_are_not() -> None:
    for old, new in renames.KEYS.items():
        section, _, name = new.partition(".")
        own = known_keys()["adapter.lora" if section == "adapter" else section]
        assert name in own and old.partition(".")[2] not in known_keys().get(old.partition(".")[0], ())


@pytest.mark.parametrize(
    ("old", "value", "new"),
    [
        ("speed.base", "bf16", ("model.quantization", "none")),
        ("speed.base", "nf4", ("model.quantization", "nf4")),
        ("speed.recompute", "cheap", ("speed.activation_checkpointing", "norms")),
        ("speed.recompute", "int8", ("speed.activation_checkpointing", "mlp_int8")),
        ("speed.recompute", "int8:8", ("speed.activation_checkpointing", "mlp_int8:8")),
        ("speed.recompute", "mlp:8", ("speed.activation_checkpointing", "mlp:8")),
        ("speed.recompute", "all", ("speed.activation_checkpointing", "full")),
        ("speed.recompute", 12, ("speed.activation_checkpointing", "full:12")),
        ("eval.keep_best", False, ("eval.load_best_model_at_end", False)),
        ("train.max_steps", 12, ("train.max_steps", 12)),
        ("speed.recompute", 0, ("speed.activation_checkpointing", 0)),
    ],
)
def test_old_value_has_its_new_name(old: str, value: object, new: tuple[str, object]) -> None:
    assert renames.current(old, value) == new
    assert renames.current(*new) == new, "today's names stay"


@pytest.mark.parametrize("value", ["cheap", "all", "int8", "12", "int8:8"])
def test_old_value_under_the_new_key_is_an_error_that_names_it(value: str) -> None:
    with pytest.raises(UserError) as raised:
        loader.load(QUICKSTART, [f"speed.activation_checkpointing={value}"])
    (problem,) = raised.value.problems
    key = "speed.activation_checkpointing"
    assert (
        problem.key == key and problem.fix == f"activation_checkpointing: {renames.current_value(key, value)}"
    )


def test_true_and_false_are_full_and_none() -> None:
    for given, meant in (("true", "full"), ("false", "none")):
        loaded = loader.load(QUICKSTART, [f"speed.activation_checkpointing={given}"])
        assert loaded.speed.activation_checkpointing == meant


def test_transformers_prefix_of_metrics_is_known() -> None:
    for given in (["eval.eval_steps=5"], []):
        loaded = loader.load(QUICKSTART, [*given, "eval.metric_for_best_model=eval_loss"])
        assert loaded.eval.metric_for_best_model == "loss"
