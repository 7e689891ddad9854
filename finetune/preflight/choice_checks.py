"""Decide whether a recipe's choices work on this machine."""

from __future__ import annotations

from finetune.autoconfig import (
    compilation,
    data_loader,
    delta_net_kernels,
    fp8_support,
    loss_support,
    machine_setup,
    mixed_precision,
    optimizer_choice,
    packing_support,
)
from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import raise_if_any
from finetune.hardware import detection
from finetune.models import model_files
from finetune.preflight import launch_conflicts, model_checks
from finetune.recipe.schema import Recipe


def setup_of(recipe: Recipe) -> Setup:
    """Choose how this machine trains a recipe.

    Raises:
        UserError: the recipe contradicts the launch (exit 2), or this machine can't train it (exit 3).
    """
    config = model_files.read_config(recipe.model)
    stored = model_checks.check_stored(recipe, config)
    # The launch has to support the quantization of the checkpoint
    kept = {"quantization": stored.storage} if stored and stored.stays else {}
    as_stored = recipe.model_copy(update={"model": recipe.model.model_copy(update=kept)})
    launch_conflicts.check(as_stored, detection.detect())
    launch_conflicts.check_launch(recipe)
    setup = machine_setup.choose_for_training(recipe, config, stored)
    packing_support.check(
        config, recipe.data, recipe.train, setup.attention.value, setup.launch.data_parallel_size
    )
    delta_net_kernels.check(config, setup.hardware)
    optimizer_choice.check(recipe.train, recipe.speed, setup)
    compilation.check_compile(recipe.speed.compile, setup.hardware)
    train_keys = recipe.train.passed_on()
    data_loader.loader_of_launch(setup.hardware, train_keys)
    mixed_precision.check_tf32(train_keys.get("tf32"), setup.hardware)
    raise_if_any(loss_support.check_recipe(recipe, config))
    if setup.hardware.device == "cpu":
        model_checks.check_on_cpu(recipe, config)
    loss_support.check_machine(recipe.speed.loss, setup.hardware, setup.launch.precision)
    fp8_support.check_experts(recipe.speed.fp8_experts, setup.hardware, setup.launch.precision)
    return setup


def pinned(recipe: Recipe) -> Recipe:
    """Return the recipe with the current commit of `model.revision`.

    Every process then reads every file of the base model at this commit (`hub.client.commit`).
    """
    revision, section = recipe.model.revision, model_files.pinned(recipe.model)
    if section.revision == revision:
        return recipe
    recipe.origin.set_by["model.revision"] = f"hub: the commit of {revision or 'main'}"
    return recipe.model_copy(update={"model": section})
