"""Correct what libraries compute incorrectly in a loaded base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.models import rotary_embeddings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks

GROUPED_BYTES = 16


def apply(model: PreTrainedModel, sharded: str, checks: RunChecks | None) -> None:
    """Apply all corrections to a model, in place.

    Args:
        sharded: the library that shards the model, such as `DeepSpeed`; empty without one.
    """
    if sharded == "DeepSpeed":
        from finetune.distributed import deepspeed_zero

        deepspeed_zero.own_buffers(model)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first evaluation. Its later
        # gradients are wrong (Linear4bit.forward of bitsandbytes 0.50.2).
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    choose_experts(model, checks)
    rotary_embeddings.forget_longest(model)


def choose_experts(model: PreTrainedModel, checks: RunChecks | None = None) -> None:
    """Compute each expert by itself if grouped GEMMs can't take its sizes.

    They need rows of a multiple of 16 bytes (torch 2.13, `torch._grouped_mm`).
    """
    stacked = [
        weight
        for module in model.modules()
        if hasattr(module, "is_concatenated")  # experts whose forward transformers chooses
        for weight in module.parameters(recurse=False)
        if weight.dim() == 3
    ]
    if any(size * weight.element_size() % GROUPED_BYTES for weight in stacked for size in weight.shape[1:]):
        model.set_experts_implementation("eager")
        if checks is not None:
            checks.notes.append(
                "each expert runs by itself: grouped GEMMs need sizes of a multiple of 16 bytes"
            )
