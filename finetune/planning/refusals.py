"""Refuse a recipe that a run under the planned launch refuses."""

from __future__ import annotations

from finetune.autoconfig import fp8_support, launch_settings, loss_support, machine_setup, optimizer_choice
from finetune.core.errors import raise_if_any
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.planning import sharding_cost
from finetune.planning.sharding_cost import Sharding
from finetune.preflight import adapter_names, launch_conflicts, model_checks
from finetune.recipe.schema import Recipe


def refuse(recipe: Recipe, machine: Hardware, processes: int, by: Sharding) -> None:
    """Refuse names that match nothing in the model and settings that the launch does not support.

    `check` and a run refuse them too.

    Raises:
        UserError: exit 3 for the loss, the optimizer and offloading, else exit 2.
    """
    precision = by.precision or launch_settings.read(machine).precision
    loss_support.check_machine(recipe.speed.loss, machine, precision)
    fp8_support.check_experts(recipe.speed.fp8_experts, machine, precision)
    model_checks.check_model(recipe)
    found = architecture.read(recipe.model)
    with launch_environment.under(dict(by.variables)):
        raise_if_any(adapter_names.check_names(recipe, found.names, found.config))
    if by.sharing > 1:
        launch_conflicts.check_window(found.config)
    with launch_environment.under(dict(by.variables)):
        contradictions = launch_conflicts.check_all(recipe, machine)
        shares = processes // by.sharing
        raise_if_any(contradictions + launch_conflicts.deepspeed_values(recipe.train, shares))
    launched = sharding_cost.launched(by, processes, launch_settings.read(machine).precision)
    none = Choice("", "")
    optimizer_choice.check(recipe.train, recipe.speed, machine_setup.Setup(machine, launched, none, none))
