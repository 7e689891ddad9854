"""Recognize the base model of a run by its config.json and samples of its tensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from finetune.core import regular_files
from finetune.core.errors import Problem, raise_if_any
from finetune.core.paths import local_path
from finetune.core.weight_files import find_weight_files
from finetune.hub import client
from finetune.models import checkpoint_headers, model_files, usual_configs
from finetune.recipe.schema import Model
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

CHANGED = "the base model has changed since the run"
# Parts of `describe`, and the file of their values
PARTS = {"config": " in config.json", "generation_config": " in generation_config.json", "tensors": ""}
OLD = "the run is of an earlier version, so finetune compares only config.json of the base model"


def describe(model: Model) -> dict[str, Any]:
    """Return the values that change what a model computes or where answers end, and hashes of the weights.

    The hash is of both ends of each tensor, so that large files take milliseconds.
    Empty for a model on the Hub, which its commit identifies.
    """
    if not local_path(model.name):
        return {}
    files = find_weight_files(Path(model.name), "model.name")
    return {
        "config": config_values(model),
        "generation_config": _generation_values(model),
        "tensors": {file.name: checkpoint_headers.sample(file) for file in files},
    }


def digest(model: Model) -> str:
    """Return a hash of `describe` and of the tokenizer's files. For a model on the Hub, return its commit."""
    if not local_path(model.name):
        return client.commit(model.name, model.revision or "main")
    files = [path for path in model_files.tokenizer_files(model) if path.name != "config.json"]
    tokenizer = {str(path.relative_to(model.name)): client.sha256(path) for path in files}
    return hashlib.sha256(json.dumps([describe(model), tokenizer]).encode()).hexdigest()


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


def _generation_values(model: Model) -> dict[str, Any]:
    """Return the values of generation_config.json. Without this file, config.json has the ends of answers."""
    path = model_files.small_file(model, "generation_config.json")
    if path:
        raw = regular_files.read_json(path, "model.name")
        return {key: value for key, value in raw.items() if key != "transformers_version"}
    path = model_files.small_file(model, "config.json")
    return {"eos_token_id": regular_files.read_json(path, "model.name").get("eos_token_id")} if path else {}


def check_adapter(folder: Path, model: Model) -> None:
    """Check that the base model has not changed since the run that has this folder of an adapter, if any.

    Raises:
        UserError: it has changed (exit 2).
    """
    folder = folder.resolve()
    run = RunFolder(folder.parent)
    raise_if_any(
        Problem(
            note,
            "adapter.init_from",
            where=str(folder),
            fix="restore the base model, or from_other_base: true",
            code="adapter-files",
        )
        for note in (_local_notes(model, run) if folder == run.adapter and run.recipe.exists() else ())
        if note != OLD
    )


def notes(model: Model, run: RunFolder) -> list[str]:
    """Return a note if the run had another base model, or if finetune can't compare the two.

    Args:
        run: its folder, or a folder with an adapter alone, which names no base model.
    """
    if not run.recipe.exists():
        return []
    own = run_folder.own_recipe(run).model
    if local_path(own.name) and local_path(model.name):
        return _local_notes(model, run)
    return _notes_of_hub(model, own)


def _local_notes(model: Model, run: RunFolder) -> list[str]:
    """Return a note if a folder differs from what `describe` returned when the run started."""
    recorded, now = run.found("environment.json").get("base_model"), describe(model)
    if not recorded or not now:
        return []
    differing = list[str]()
    for part, where in PARTS.items():
        then, today = recorded.get(part, now[part]), now[part]
        keys = sorted(then.keys() | today.keys())
        differing += [f"{key}{where}" for key in keys if then.get(key) != today.get(key)]
    if not differing:
        return [] if "tensors" in recorded else [OLD]
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return [f"{CHANGED}: {', '.join(differing[:3])}{more}"]


def _notes_of_hub(model: Model, own: Model) -> list[str]:
    """Return the same for a model on the Hub, now or at the start. Its commit identifies it.

    Args:
        own: the base model of the run.
    """
    if (own.name, own.revision) == (model.name, model.revision):
        return []
    was = f"{own.name} at {own.revision or 'main'}"
    if local_path(own.name) or local_path(model.name):
        return [f"finetune can't compare the base model {model.name} with the run's base model {own.name}"]
    commit = client.commit(model.name, model.revision or "main")
    return [] if commit == own.revision else [f"{CHANGED}: {model.name} at {commit} in place of {was}"]
