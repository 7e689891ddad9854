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
    kind, speed = raw["adapter"]["type"], Speed.model_validate(raw.get("speed", {}))
    model = Model.model_validate(raw["model"])
    by_launch = launch_conflicts.problems(setup.hardware, kind, model, recipe.data, speed)
    again = speed.activation_checkpointing
    graphs = compilation.check_cuda_graphs(speed.compile, again, speed.offload, setup.launch.sharded)
    if (
        by_launch
        or graphs
        or adapter_rules.conflicts(raw)
        or base_quantization.missing_package(model.quantization)
    ):
        return False
    try:
        optimizer_choice.check(recipe.train, speed, setup)
    except UserError:
        return False
    return True
