"""Decide which base models gain from fp8."""

from __future__ import annotations

from finetune.core import model_config
from finetune.core.model_config import ModelConfig
from finetune.kernels.kernel_limits import FP8_WIDTH
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
