"""Choose attention and quantization on this machine, for `finetune doctor`."""

from __future__ import annotations

from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    fp8_support,
    launch_settings,
    mixed_precision,
)
from finetune.autoconfig.attention_choice import RowLayout
from finetune.core import run_checks
from finetune.core.errors import UserError
from finetune.hardware.detection import Hardware
from finetune.models import architecture, model_files
from finetune.recipe.schema import Recipe


def attention(recipe: Recipe | None, machine: Hardware) -> tuple[str, str]:
    """Choose the attention kernel for the recipe, or for a Llama if there is no recipe or no config."""
    rows, attends, unread = RowLayout(packed=False, longest=1024), None, ""
    dtype = mixed_precision.DTYPES[launch_settings.read(machine).precision]
    if recipe:
        rows = RowLayout(recipe.data.flat, recipe.data.max_length)
        try:
            attends = attention_choice.read(architecture.read(recipe.model).config)
        except UserError:
            unread = f"; assumes a Llama, because no config of {recipe.model.name} can be read"
    try:
        requested = recipe.model.attention if recipe else "auto"
        name, reason = attention_choice.choose(requested, machine, dtype, attends, rows)
        return run_checks.Choice(name, f"{reason}{unread}")
    except UserError as error:
        return "-", error.problems[0].why


def base(recipe: Recipe | None, machine: Hardware) -> run_checks.Choice:
    """Choose the quantization of the base model."""
    requested, kind = (recipe.model.quantization, recipe.adapter.type) if recipe else ("auto", "lora")
    against_fp8 = "the model is not known without a recipe"
    try:
        precision = launch_settings.read(machine).precision
        if recipe and not mixed_precision.fp8_missing(machine, precision):
            against_fp8 = fp8_support.against_fp8(recipe, model_files.read_config(recipe.model))
        return base_quantization.choose_base(requested, kind, precision, machine, against_fp8)
    except UserError as error:
        return run_checks.Choice("-", f"{error.problems[0].what}; {error.problems[0].fix}")
