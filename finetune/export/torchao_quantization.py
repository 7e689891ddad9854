"""Quantize weights to 8 or 4 bits with torchao: `finetune merge RUN --quantize int8|int4|fp8`.

All linear layers except the output head are quantized. The head, the embeddings, the norms and experts in a
single stacked parameter keep their dtype. So a head that is tied to the embeddings stays tied.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.models import model_class, module_names
from finetune.quantization import qat

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from finetune.hardware.detection import Hardware
    from finetune.recipe.schema import Qat


GROUP = 32  # weights per scale in int4: the smallest and most accurate group that torchao's kernels support
KEPT = "output head, embeddings, norms"


def choose(kind: str, dtype: torch.dtype, hardware: Hardware, trained: Qat | None = None) -> tuple[Any, str]:
    """Return torchao's config for a storage format, and a description for users of the weights.

    torchao 0.18 packs two int4 weights into a byte only for NVIDIA GPUs. Its other packed layouts need the
    package mslk or an Intel GPU. On other devices each 4-bit value takes a byte.

    Args:
        kind: int8 | int4 | fp8.
        dtype: dtype of scales and of all weights that are not quantized.
        trained: the QAT settings of the run, if it has them. The weights are then stored in this format.
    """
    if trained is not None:
        return qat.torchao_config(trained), f"{qat.describe(trained)}, one byte per weight"
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
    )

    if kind == "int8":
        return Int8WeightOnlyConfig(), "int8, one scale per output"
    if kind == "fp8":
        return Float8WeightOnlyConfig(), "fp8 (e4m3), one scale per output"
    if hardware.device == "cuda" and hardware.capability >= (8, 0) and dtype == torch.bfloat16:
        packed: Any = "tile_packed_to_4d"
        config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format=packed)
        return config, f"int4 in groups of {GROUP}, packed for NVIDIA GPUs only"
    four_bits: Any = torch.__dict__["int4"]  # missing in torch's type stubs
    config = IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=PerGroup(GROUP))
    return config, f"int4 in groups of {GROUP}, one byte per weight: as large as int8, but less exact"


def load(
    source: Path,
    kind: str,
    dtype: torch.dtype,
    hardware: Hardware,
    trained: Qat | None = None,
    **options: object,
) -> PreTrainedModel:
    """Load the model in `source` and quantize it while it loads.

    Args:
        options: options for `from_pretrained`, such as attention and device.

    Raises:
        UserError: torchao does not support this format on this device (exit 3) or for these layers (exit 2).
    """
    from torchao.quantization import quantize_
    from transformers import TorchAoConfig

    config, _ = choose(kind, dtype, hardware, trained)
    try:  # test one layer first, because transformers hides torchao's message
        group = (trained and trained.group_size) or 1
        quantize_(torch.nn.Linear(64 * group, 64, bias=False, dtype=dtype, device=hardware.device), config)
    except Exception as error:  # torchao raises many types for missing features, such as AssertionError
        raise UserError(
            Problem(
                f"torchao can't quantize to {kind} on {hardware.name}",
                found=f"{type(error).__name__}: {first_line(error)}",
                fix="set ACCELERATE_USE_CPU=true, or choose another --quantize",
                code="quantize",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    try:
        return model_class.open_folder(
            source, dtype=dtype, quantization_config=TorchAoConfig(config), **options
        )
    except (RuntimeError, ValueError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UserError(
            Problem(
                f"torchao can't quantize the layers of this model to {kind}",
                found=first_line(error),
                fix="choose another --quantize",
                code="quantize",
            )
        ) from error


def left_out(model: torch.nn.Module) -> tuple[int, list[str]]:
    """Return the number of quantized linear layers, and the names of the other linear layers."""
    linear = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    plain = [name for name, m in linear.items() if not is_quantized(m.weight)]
    return len(linear) - len(plain), plain


def kept(model: torch.nn.Module, size: int) -> str:
    """Describe the parts that are not quantized.

    Args:
        size: total bytes of the stored weights.
    """
    stacked = module_names.of_experts(model)
    share = f"{stacked / 1e6:.1f} MB, {stacked / size:.0%} of the stored weights"
    return KEPT + (f", experts ({share}; they are not linear layers)" if stacked else "")


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether torchao stores the weight."""
    return type(weight).__module__.startswith("torchao.")


def check_installed() -> None:
    """Refuse to quantize without torchao (exit 3)."""
    packages.require("torchao", "quantize", "--quantize needs the package torchao")
