"""Recognize the base model of a run by its config.json and samples of its weight files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core import regular_files, verified_files
from finetune.core.weight_files import find_weight_files
from finetune.models import model_files, usual_configs

if TYPE_CHECKING:
    from finetune.recipe.schema import Model
    from finetune.run_folder.run_folder import RunFolder


def describe(model: Model) -> dict[str, Any]:
    """Return the values of config.json that change what a model computes, and a hash of each weight file.

    The hash is of samples, so that large files take milliseconds. A few changed bytes may be between them.
    """
    path = model_files.small_file(model, "config.json")
    files = find_weight_files(path.parent, "model.name") if path else []
    return {
        "config": config_values(model),
        "weights": {file.name: verified_files.sample(file) for file in files},
    }


def config_values(model: Model) -> dict[str, Any]:
    """Return the values in a model's config.json that can change what it computes."""
    path = model_files.small_file(model, "config.json")
    raw = regular_files.read_json(path, "model.name") if path else {}
    words = raw.get("vocab_size") or 0
    return {
        key: value
        for key, value in raw.items()
        if key == "quantization_config" or not usual_configs.has_no_effect(key, value, words)
    }


def notes(model: Model, run: RunFolder) -> list[str]:
    """Return a note if the base model of a run differs from what `describe` returned when the run started."""
    recorded = run.found("environment.json").get("base_model")
    if not recorded:
        return []
    now, differing = describe(model), list[str]()
    for part, where in (("config", " in config.json"), ("weights", "")):
        then, today = recorded.get(part, {}), now.get(part, {})
        keys = sorted(then.keys() | today.keys())
        differing += [f"{key}{where}" for key in keys if then.get(key) != today.get(key)]
    if not differing:
        return []
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return [f"the base model has changed since the run: {', '.join(differing[:3])}{more}"]
