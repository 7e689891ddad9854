"""Read bitsandbytes' 4-bit weights (NF4 and FP4, arXiv 2305.14314) as tensors for `ops.dequantize`.

bitsandbytes' own layer keeps the weights, and only its small tables are copied. Each weight is three tensors:

    packed   [out, in / 2] uint8: two 4-bit values per byte, the first in the high bits
    absmax   one scale per block of weights: float32, or uint8 with double quantization
    table    float32: the 16 values that a 4-bit value stands for; with double quantization
             also the 256 values of a uint8 scale, an offset, and a scale for each 256 scales
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from finetune.core.errors import Exit, Problem, UserError
from finetune.kernels import ops

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accelerate import Accelerator
    from torch import nn


def is_four_bit(base: nn.Module) -> bool:
    """Return whether a layer is bitsandbytes' `Linear4bit`.

    The check uses the name, as PEFT does, so bitsandbytes need not be installed.
    """
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def pack(base: Any, numbers: torch.dtype = torch.float32) -> None:
    """Store packed weights as fp32 values (eight 4-bit values each), so that FSDP can shard them.

    FSDP does not shard uint8 tensors, and copies could change the bits of 16-bit values (see `fsdp_policy`).
    """
    for layer in base.modules():
        if is_four_bit(layer) and layer.weight.dtype != numbers:
            attributes = {name: value for name, value in vars(layer.weight).items() if name != "data"}
            packed = layer.weight.detach().as_subclass(torch.Tensor).view(-1).view(numbers).view(-1, 1)
            layer.weight = type(layer.weight)(packed, **{**attributes, "quant_storage": numbers})
            layer.quant_storage = numbers


def unsupported_reason(base: Any) -> str:
    """Return why `ops.dequantize` cannot dequantize a `Linear4bit`, or an empty string."""
    state = base.weight.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return "its 4-bit weight is not in bitsandbytes' own layout"
    if tuple(state.shape) != (base.out_features, base.in_features):
        return f"its 4-bit weight is stored as {tuple(state.shape)}"
    if state.nested and state.state2.blocksize != ops.NESTED:
        return f"its scales are quantized in blocks of {state.state2.blocksize}"
    if base.in_features % state.blocksize:
        return f"its rows of {base.in_features} weights are not whole 4-bit blocks of {state.blocksize}"
    return ""


def check_rows(layers: Mapping[str, tuple[int, int]]) -> None:
    """Check that bitsandbytes reads 4-bit weights correctly on this CPU (exit 3).

    Args:
        layers: name of a layer -> weights in a row, weights in a block.
    """
    wrong = {name: row for name, row in layers.items() if row[0] % row[1] and _misreads(*row)}
    if wrong:
        name, (row, block) = next(iter(wrong.items()))
        raise UserError(
            Problem(
                f"bitsandbytes reads the 4-bit weights of {len(wrong)} layers incorrectly on this CPU",
                "model.quantization",
                found=f"{name}: rows of {row} weights",
                why=f"the rows are not whole blocks of {block} weights",
                fix="use a GPU, or a base model in 16 bits with model.quantization: none",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )


def rows(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the layers whose 4-bit weights are on the CPU, as `check_rows` takes them."""
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if is_four_bit(layer)}
    weights = [(name, layer.weight) for name, layer in layers.items() if layer.weight.device.type == "cpu"]
    states = {name: weight.quant_state for name, weight in weights if weight.quant_state is not None}
    return {name: (state.shape[-1], state.blocksize) for name, state in states.items()}


@cache
def _misreads(row: int, block: int) -> bool:
    """Return whether this CPU reads rows differently from the same weights in rows of one block each.

    bitsandbytes 0.50.2 does so with AVX512, if the number of weights in a row is a multiple of 16.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weights = torch.linspace(0, 1, row * block)
    read = [
        dequantize_4bit(*quantize_4bit(weights.view(-1, size), blocksize=block, quant_type="nf4"))
        for size in (row, block)
    ]
    return not torch.equal(read[0].flatten(), read[1].flatten())


def stored(base: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return packed, absmax and table of a layer without `unsupported_reason`.

    The first two share the layer's memory.

    They describe the weight at the start of training. PEFT's merge and unmerge quantize the weight again,
    which changes it.
    """
    state = base.weight.quant_state
    packed = base.weight.detach().as_subclass(torch.Tensor).view(-1).view(torch.uint8)
    table = state.code.float()
    if state.nested:
        second = state.state2
        table = torch.cat([table, second.code.float(), state.offset.float().view(1), second.absmax.float()])
    return packed.view(base.out_features, base.in_features // 2), state.absmax, table


def weight(base: nn.Module) -> torch.Tensor:
    """Return the dequantized weight of a layer: [out, in] in its compute dtype."""
    return ops.dequantize(list(stored(base)), compute_dtype(base))


def compute_dtype(base: Any) -> torch.dtype:
    """Return the dtype that a layer computes in.

    bitsandbytes can set it during the first forward pass. Before that, the layer computes in its weight's
    dtype.
    """
    return base.compute_dtype or base.weight.quant_state.dtype


def use_policy(accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Set FSDP's mixed precision: `fsdp_policy` for weights, fp32 for gradients, and unchanged outputs.

    Accelerate's own policy for bf16 also casts gradients and outputs. The summed loss of a batch would keep
    only three digits.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and accelerator.mixed_precision in ("bf16", "fp16"):
        plugin.mixed_precision_policy = fsdp_policy(accelerator.mixed_precision, model)


def fsdp_policy(precision: str, model: torch.nn.Module) -> Any:
    """Return FSDP's mixed precision policy.

    FSDP gathers weights in 16 bits. A model with 4-bit weights gathers all weights as they are stored, and
    autocast casts them.

    Packed 4-bit weights can have any bits. Read as 16-bit values, some are NaNs, and CUDA copies replace
    every NaN by the same bits (pytorch #159333). Logits were 4.5 % off (bitsandbytes #1945).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    as_stored = any(is_four_bit(module) for module in model.modules())
    return MixedPrecisionPolicy(param_dtype=None if as_stored else dtype, reduce_dtype=torch.float32)
