"""Run checks on how the base model's weights are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune.core import formatting
from finetune.core.errors import Exit
from finetune.kernels.kernel_limits import EXPERTS_STORAGES, FP8_MULTIPLE
from finetune.models import module_names
from finetune.quantization import stacked_experts
from finetune.quantization.fp8_linear import Fp8Linear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks


def add_quantized_weights_check(
    model: PreTrainedModel, storage: str, checks: RunChecks, *, stored: bool = False
) -> None:
    """Add a run check of the linear layers that bitsandbytes or torchao quantized, before an adapter."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if hasattr(m, "in_features") and m is not head]
    coded = sum(module_names.stored_as(layer) == storage for layer in linear)
    actual = f"{coded} of {len(linear)} linear layers, {formatting.size(model.get_memory_footprint())} in all"
    actual += f"; {len(linear) - coded} are not quantized" if coded < len(linear) else ""
    actual += experts(model)
    checks.add(
        "model.quantization",
        expected=storage,
        actual=actual,
        how="the layers of the live model",
        ok=bool(coded) and not _missed(model, storage, stored=stored),
        code=Exit.ENVIRONMENT,
    )


def experts(model: PreTrainedModel) -> str:
    """Say how many bytes of stacked experts are quantized, and how many are not."""
    held, whole = stacked_experts.sizes(model)
    said = f"; experts: {formatting.size(whole)} (in bf16) in {formatting.size(held)}" if whole else ""
    said += (
        ", in mxfp4 as stored"
        if any(by.storage == "mxfp4" for _, by in stacked_experts.all_of(model))
        else ""
    )
    plain = module_names.of_experts(model)
    return said + (f"; {formatting.size(plain)} of experts are not quantized" if plain else "")


def _missed(model: PreTrainedModel, storage: str, *, stored: bool) -> bool:
    """Return whether stacks of experts are not quantized, although this storage quantizes them.

    Args:
        stored: whether the checkpoint is quantized already.
    """
    return storage in EXPERTS_STORAGES and not stored and bool(stacked_experts.names(model))


def add_fp8_check(base: PreTrainedModel, checks: RunChecks, *, stored: bool = False) -> None:
    """Add a run check of the fp8 layers and their bytes in the live base model, before it gets an adapter."""
    head = base.get_output_embeddings()
    linear = [m for m in base.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    layers = [m for m in linear if isinstance(m, Fp8Linear)]
    narrow = sum(bool(m.in_features % FP8_MULTIPLE or m.out_features % FP8_MULTIPLE) for m in linear)
    plain = len(linear) - len(layers) - narrow
    coded = sum(t.nbytes for m in layers for t in (*m.parameters(), *m.buffers()))
    whole = base.get_memory_footprint()
    held = f"{formatting.size(coded)} of {formatting.size(whole)}"
    actual = f"{len(layers)} of {len(linear)} linear layers, {held}"
    actual += f"; {narrow} have sides not divisible by {FP8_MULTIPLE}" if narrow else ""
    actual += f"; {plain} are not fp8 in the checkpoint" if plain else ""
    actual += experts(base)
    checks.add(
        "model.quantization",
        expected="fp8",
        actual=actual,
        how="fp8 layers of the live model, and bytes of their weights and scales",
        ok=bool(layers) and not _missed(base, "fp8", stored=stored),
    )
