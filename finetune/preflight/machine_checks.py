"""Refuse settings that this machine can't run."""

from __future__ import annotations

from finetune.autoconfig import (
    compilation,
    data_loader,
    delta_net_kernels,
    loss_support,
    mixed_precision,
    optimizer_choice,
)
from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import raise_if_any
from finetune.core.model_config import ModelConfig
from finetune.recipe.schema import Recipe


def check(recipe: Recipe, config: ModelConfig, setup: Setup) -> None:
    """Check the kernels of the model, the optimizer, compilation, the data loader, TF32 and the loss.

    Raises:
        UserError: the recipe contradicts the launch (exit 2), or this machine can't train it (exit 3).
    """
    delta_net_kernels.check(config, setup.hardware)
    optimizer_choice.check(recipe.train, recipe.speed, setup)
    compilation.check_compile(recipe.speed.compile, setup.hardware)
    given = recipe.train.passed_on()
    data_loader.loader_of_launch(setup.hardware, given)
    mixed_precision.check_tf32(given.get("tf32"), setup.hardware)
    raise_if_any(loss_support.check_recipe(recipe, config))
    loss_support.check_machine(recipe.speed.loss, setup.hardware, setup.launch.precision)
