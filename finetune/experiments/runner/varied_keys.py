"""Define which recipe keys an experiment can vary, and format their values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.core import strict_yaml
from finetune.core.errors import Problem, nearest
from finetune.recipe import build, recipe_errors
from finetune.recipe.schema import Recipe
from finetune.run_folder.comparability import last_parts
from finetune.run_folder.settings_text import flow

SAME_ROWS = "finetune compares the runs by the same metric on the same validation set"
FIXED = {  # keys and sections that all compared runs share, in ablations and sweeps
    "publish": "compared runs publish nothing",
    "eval": SAME_ROWS,
    "model.name": SAME_ROWS,
    "model.revision": SAME_ROWS,
    "model.add_tokens": SAME_ROWS,
    "data.validation": SAME_ROWS,
    "data.validation_fraction": SAME_ROWS,
    "data.train_on": SAME_ROWS,
    "data.reasoning": SAME_ROWS,
    "data.format": SAME_ROWS,
    "data.columns": SAME_ROWS,
    "data.role_map": SAME_ROWS,
    "data.chat_template": SAME_ROWS,
    "data.template_date": SAME_ROWS,
    "data.max_length": SAME_ROWS,
    "data.too_long": SAME_ROWS,
    "train.seed": "all runs use the recipe's seed",
    "train.output_dir": "each run has a folder of its own",
}

# Keys that all compared runs share if the validation set is a part of the training data
_OF_DRAWN = ("data.name", "data.revision", "data.subset", "data.split")
_PATHS = (
    "model.name",
    "data.name",
    "data.validation",
    "data.chat_template",
    "adapter.init_from",
    "eval.tasks",
    "eval.forgetting",
)
NO_RESULT = (  # keys that change no result, so a study from an older version may lack them
    "data.max_example_bytes",
    "data.max_uncompressed_bytes",
    "eval.min_loss_difference",
    "eval.min_score_difference",
    "train.dataloader_timeout",
)


def drawn_problems(recipe: Recipe, keys: Mapping[str, str]) -> list[Problem]:
    """Return the problems of varied keys that change a validation set drawn by `data.validation_fraction`.

    Args:
        keys: the position of each key in its file.
    """
    return [
        Problem(
            "compared runs can't differ in this key",
            key,
            where=where,
            fix="name a file with validation examples: data.validation=FILE",
            why=f"{SAME_ROWS}, and the recipe draws it from the training data",
            code="recipe-conflict",
        )
        for key, where in keys.items()
        if key in _OF_DRAWN and recipe.data.validation_fraction is not None
    ]


def overrides(values: dict[str, Any]) -> list[str]:
    """Return the values as command line overrides."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def key_problem(key: str, value: object, at: str) -> Problem | None:
    """Return the problem of a dotted recipe key, with the nearest key, or `None` if the key is valid."""
    known = build.known_keys()
    types = (names for name, names in known.items() if name.startswith("adapter."))
    known = {**known, "adapter": frozenset[str]().union(*types)}
    section, *names = key.split(".")
    if section not in known["recipe"] or not all([section, *names]) or not names:
        every = [f"{one}.{name}" for one in sorted(known["recipe"]) for name in sorted(known[one])]
        last = key.rpartition(".")[2]
        fix = next((one for one in every if one.endswith(f".{last}")), "") or nearest(key, every)
        return Problem(
            "recipes have no such key",
            where=at,
            found=key,
            expected="" if fix else "a key such as adapter.r",
            fix=fix,
            code="unknown-key",
        )
    inner = known.get(f"{section}.{names[0]}") if section != "adapter" or len(names) > 1 else None
    if names[0] in known[section] and (len(names) == 1 or not inner or names[1] in inner):
        return None
    path = (section, *names[: 2 if names[0] in known[section] else 1])
    return recipe_errors.unknown_key(path, under(path, value), {path: at}, known)


def under(path: Sequence[str], value: object) -> Any:
    """Return a value under nested keys, as in a recipe."""
    for name in reversed(path):
        value = {name: value}
    return value


def text_of(value: object) -> str:
    """Format a value as an override that strict YAML reads back: lora, 0.1, [q_proj, v_proj]."""
    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum():
        return value if strict_yaml.scalar(value) == value else flow(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return flow(value)


def values_of(recipe: Recipe) -> dict[str, str]:
    """Return a recipe's values by dotted key, and paths without their folder, because machines differ."""
    own: Any = {"train": {"output_dir"}, "data": {"cache_dir"}, "publish": True}
    values = recipe.model_dump(mode="json", exclude_none=True, exclude=own)
    found = {f"{section}.{key}": value for section, part in values.items() for key, value in part.items()}
    return {key: str(last_parts(value) if key in _PATHS else value) for key, value in found.items()}


def differing(began: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the keys whose values differ and can change a result."""
    return [k for k in {**began, **now} if began.get(k) != now.get(k) and k not in NO_RESULT]
