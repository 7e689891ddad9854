"""Decide which base models gain from fp8, and where the GEMMs of experts can run in fp8."""

from __future__ import annotations

from finetune.core import model_config
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.model_config import ModelConfig
from finetune.hardware.detection import Hardware
from finetune.kernels.kernel_limits import FP8_EXPERTS_CAPABILITY, FP8_WIDTH
from finetune.quantization import stored_weights
from finetune.recipe import adapter_rules
from finetune.recipe.schema import Recipe


def config_against_fp8(config: ModelConfig) -> str:
    """Return why `model.quantization: auto` does not use fp8 for this config; the empty string if it may."""
    width = getattr(config.get_text_config(), "hidden_size", 0)
    if width < FP8_WIDTH:
        return f"layers of width {width} are too small to be faster in fp8 (the smallest is {FP8_WIDTH})"
    if count := model_config.experts(config.get_text_config()):
        saves = "`model.quantization: fp8` saves memory, and time on Hopper GPUs"
        return f"`auto` does not choose fp8 for a mixture of {count} experts; {saves}"
    stored = stored_weights.read(config)
    if stored and stored.storage != "fp8":
        return f"the checkpoint is stored in {stored}, which fp8 can't represent exactly"
    return ""


def against_fp8(recipe: Recipe, config: ModelConfig) -> str:
    """Return why `model.quantization: auto` does not use fp8 for this recipe; the empty string if it may."""
    by_recipe = adapter_rules.against_fp8(recipe.adapter, recipe.speed, recipe.eval)
    return by_recipe or config_against_fp8(config)


def check_experts(fp8_experts: str | bool, hardware: Hardware, precision: str) -> None:
    """Stop if the recipe requests fp8 GEMMs of experts that this machine or the precision excludes.

    Args:
        fp8_experts: `speed.fp8_experts`.
        precision: the launch's mixed precision.

    Raises:
        UserError: exit 3.
    """
    reason = ""
    if hardware.device != "cuda" or hardware.capability != FP8_EXPERTS_CAPABILITY:
        reason = f"{hardware.name} is no Hopper GPU (compute capability 9.0)"
    elif precision != "bf16":
        reason = f"fp8 GEMMs return bf16, and the launch's precision is {precision}"
    if fp8_experts is True and reason:
        raise UserError(experts_refusal(reason), code=Exit.ENVIRONMENT)


def experts_refusal(reason: str) -> Problem:
    """Return the problem of requested fp8 GEMMs of experts that do not work."""
    return Problem(
        "the GEMMs of the experts can't run in fp8",
        "speed.fp8_experts",
        found="true",
        why=reason,
        fix="speed.fp8_experts: auto",
        code="speed-option",
    )
