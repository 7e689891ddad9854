"""Choose storage and attention of a planned run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from finetune.autoconfig import attention_choice, base_quantization, mixed_precision
from finetune.core.run_checks import Choice
from finetune.models import fp8_support
from finetune.planning import sharding_cost
from finetune.preflight import model_checks
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.models.architecture import Architecture
    from finetune.planning.planned_run import Target
    from finetune.recipe.schema import Recipe


def storage_and_attention(recipe: Recipe, found: Architecture, target: Target) -> tuple[Choice, Choice]:
    """Choose the base model's storage and the attention, as `choice_checks.setup_of` does for a run."""
    flat, kind = recipe.data.packing or recipe.data.padding_free, recipe.adapter.type
    against = partial(fp8_support.against_fp8, recipe, found.config)
    by, precision, machine = target.by, target.precision, target.machine
    launched = sharding_cost.launched(by, 1, precision)
    if kept := base_quantization.whole_base(launched):
        against = partial(str, kept)
    quantization = (
        "fp8" if by.frozen_fp8 and recipe.model.quantization == "auto" else recipe.model.quantization
    )
    stored = model_checks.check_stored(recipe, found.config)
    base = base_quantization.choose_base(quantization, kind, precision, machine, against, stored)
    dtype = mixed_precision.compute_dtype(precision, base.value)
    shown = attention_choice.RowLayout(flat, recipe.data.max_length, adapter_types.find(kind).prompt)
    attends = attention_choice.read(found.config)
    return base, Choice(*attention_choice.choose(recipe.model.attention, machine, dtype, attends, shown))
