"""Weights in 8 or 4 bits, by torchao through transformers: `finetune merge RUN --quantize int8|int4|fp8`.

Every linear layer's weight is quantised but the output head's; the head, the embeddings, the norms and
experts whose weights stand in one parameter keep the dtype they had, so a head that shares its weights with
the embeddings still does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.models import model_class, module_names
from finetune.quantization import qat

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Qat

GROUP = (
    32  # weights that share one scale in int4: the smallest that torchao's kernels take, and the most exact
)
KEPT = "output head, embeddings, norms"


def choose(kind: str, dtype: torch.dtype, hardware: Hardware, trained: Qat | None = None) -> tuple[Any, str]:
    """torchao's config for one kind of storage, and what it means for who opens the weights.

    int4: torchao 0.18 packs two weights into a byte on NVIDIA GPUs only (its other packed layouts need the
    package mslk or an Intel GPU). Elsewhere each 4-bit value keeps a byte of its own.

    Args:
        kind: int8 | int4 | fp8.
        dtype: of scales, and of all that is not quantised.
        trained: how a run rounded its weights in training, if it did: they are stored just so.
    """
    if trained is not None:
        return qat.torchao_config(trained), f"{qat.describe(trained)}, a byte for each weight"
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if kind == "int8":
        return Int8WeightOnlyConfig(), "int8, a scale for each output"
    if kind == "fp8":
        return Float8WeightOnlyConfig(), "fp8 (e4m3), a scale for each output"
    if hardware.device == "cuda" and hardware.capability >= (8, 0) and dtype == torch.bfloat16:
        packed: Any = "tile_packed_to_4d"
        config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=packed)
        return config, f"int4 in groups of {GROUP}, packed for NVIDIA GPUs: it opens on no other device"
    four_bits: Any = torch.__dict__["int4"]  # not in torch's type stubs
    config = IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=PerGroup(GROUP))
    return config, f"int4 in groups of {GROUP}, a byte for each weight: as large as int8, and less exact"


def load(
    source: Path,
    kind: str,
    dtype: torch.dtype,
    hardware: Hardware,
    trained: Qat | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model in folder `source`, quantised while it loads.

    Args:
        options: of `from_pretrained`: attention, device.

    Raises:
        UserError: torchao can't store this kind on this device (exit 3) or these layers (exit 2).
    """
    from torchao.quantization import quantize_
    from transformers import TorchAoConfig

    config, _ = choose(kind, dtype, hardware, trained)
    try:  # on one layer: transformers hides torchao's reason
        group = (trained and trained.group_size) or 1
        quantize_(torch.nn.Linear(64 * group, 64, bias=False, dtype=dtype, device=hardware.device), config)
    except (
        Exception
    ) as error:  # torchao raises ImportError, AssertionError, ValueError ... for what is not there
        found = f"{type(error).__name__}: {first_line(error)}"
        fix = "ACCELERATE_USE_CPU=true, or another --quantize"
        problem = Problem(f"torchao can't make {kind} weights on {hardware.name}", found=found, fix=fix)
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    try:
        return model_class.open_folder(
            source, dtype=dtype, quantization_config=TorchAoConfig(config), **options
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        what, fix = f"torchao can't make this model's layers {kind}", "another --quantize"
        raise UserError(Problem(what, found=first_line(error), fix=fix)) from error


def left_out(model: torch.nn.Module) -> tuple[int, list[str]]:
    """How many linear layers are quantised, and the names of those that are not."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    plain = [name for name, m in linear.items() if not is_quantised(m.weight)]
    return len(linear) - len(plain), plain


def kept(model: torch.nn.Module, size: int) -> str:
    """What keeps the dtype it had.

    Args:
        size: bytes of all that is stored.
    """
    stacked = module_names.of_experts(model)
    share = f"{stacked / 1e6:.1f} MB, {stacked / size:.0%} of what is stored"
    return KEPT + (f", experts ({share}: they are no linear layers)" if stacked else "")


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether torchao holds it."""
    return type(weight).__module__.startswith("torchao.")
