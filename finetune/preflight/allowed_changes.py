"""Decide whether this machine runs a recipe with another value."""

from __future__ import annotations

from finetune.autoconfig import base_quantization, compilation, optimizer_choice
from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import UserError
from finetune.preflight import launch_conflicts
from finetune.recipe import adapter_rules
from finetune.recipe.schema import Model, Recipe, Speed


def allows(recipe: Recipe, setup: Setup, change: str) -> bool:
    """Return whether this machine would run the recipe with another value.

    Args:
        change: such as `speed.activation_checkpointing=full` or `adapter.type=lora`.
    """
    key, _, value = change.partition("=")
    section, _, name = key.partition(".")
    raw = recipe.model_dump(exclude_unset=True)
    if section not in ("model", "speed", "adapter") or not value:
        return True
    raw[section] = {**raw.get(section, {}), name: value}
    model, speed = Model.model_validate(raw["model"]), Speed.model_validate(raw.get("speed", {}))
    adapter = recipe.adapter.model_copy(update={"type": raw["adapter"]["type"]})
    changed = recipe.model_copy(update={"model": model, "speed": speed, "adapter": adapter})
    again = speed.activation_checkpointing
    graphs = compilation.check_cuda_graphs(speed.compile, again, speed.offload, setup.launch.sharded)
    lacking = base_quantization.missing_package(model.quantization)
    by_launch = launch_conflicts.check_all(changed, setup.hardware)
    if by_launch or graphs or lacking or adapter_rules.conflicts(raw):
        return False
    try:
        optimizer_choice.check(recipe.train, speed, setup)
    except UserError:
        return False
    return True
