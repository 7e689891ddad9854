"""bitsandbytes' 4-bit weights (NF4 and FP4, arXiv 2305.14314) as tensors that `ops.dequantise` takes.

bitsandbytes' own layer keeps them; nothing is copied but its tables. Each weight is three tensors:

    packed   [out, in / 2] uint8: two codes a byte, the first in the high bits
    absmax   a scale for each block of weights: float32, or codes in uint8 (double quantisation)
    table    float32: the 16 values of a code; under double quantisation then the 256 values of a scale's
             code, an offset, and a scale for each 256 of those codes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.kernels import ops

if TYPE_CHECKING:
    from torch import nn


def is_four_bit(base: nn.Module) -> bool:
    """Whether a layer is bitsandbytes' `Linear4bit`; told by name, as PEFT does: it need not be installed."""
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def pack(base: Any, numbers: torch.dtype = torch.float32) -> None:
    """Codes as FSDP can split them: eight as one fp32 number. Bytes it would not split, and of numbers of 16
    bits it would make others (`fsdp_policy`)."""
    for layer in base.modules():
        if is_four_bit(layer) and layer.weight.dtype != numbers:
            held = {name: value for name, value in vars(layer.weight).items() if name != "data"}
            packed = layer.weight.detach().as_subclass(torch.Tensor).view(-1).view(numbers).view(-1, 1)
            layer.weight = type(layer.weight)(packed, **{**held, "quant_storage": numbers})
            layer.quant_storage = numbers


def obstacle(base: Any) -> str:
    """Why a `Linear4bit` can't be dequantised by `ops.dequantise`; the empty string if it can."""
    state = base.weight.quant_state
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return "its 4-bit weight is not in bitsandbytes' own layout"
    if tuple(state.shape) != (base.out_features, base.in_features):
        return f"its 4-bit weight is stored as {tuple(state.shape)}"
    if state.nested and state.state2.blocksize != ops.NESTED:
        return f"its scales are quantised in blocks of {state.state2.blocksize}"
    if base.in_features % state.blocksize:  # on the CPU bitsandbytes 0.50.2 itself reads such rows wrongly
        return f"its rows of {base.in_features} weights are not whole 4-bit blocks of {state.blocksize}"
    return ""


def stored(base: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed, absmax and table of a layer that has no `obstacle`; the first two share its memory.

    They are of the weight that training began with: PEFT's merge and unmerge round it anew, into another.
    """
    state = base.weight.quant_state
    packed = base.weight.detach().as_subclass(torch.Tensor).view(-1).view(torch.uint8)
    table = state.code.float()
    if state.nested:
        second = state.state2
        table = torch.cat([table, second.code.float(), state.offset.float().view(1), second.absmax.float()])
    return packed.view(base.out_features, base.in_features // 2), state.absmax, table


def weight(base: nn.Module) -> torch.Tensor:
    """The weight that a layer computes with, [out, in] in its compute dtype."""
    return ops.dequantise(list(stored(base)), compute_dtype(base))


def compute_dtype(base: Any) -> torch.dtype:
    """The dtype a layer computes in; before its first forward it may not be set, and is its weight's."""
    return base.compute_dtype or base.weight.quant_state.dtype


def use_policy(accelerator: Any, model: torch.nn.Module) -> None:
    """Let FSDP gather weights as `fsdp_policy` has it, add up gradients in fp32, and return what the model
    returns.

    Accelerate's own policy for bf16 casts both: the summed loss of a batch would lose all but three digits.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and accelerator.mixed_precision in ("bf16", "fp16"):
        plugin.mixed_precision_policy = fsdp_policy(accelerator.mixed_precision, model)


def fsdp_policy(precision: str, model: torch.nn.Module) -> Any:
    """Weights are gathered and multiplied in 16 bits; around 4-bit codes as they are stored, for autocast to
    cast.

    Codes may be any bits. As numbers of 16 bits some are NaNs, of which CUDA's copies make one and the same
    (pytorch #159333): logits were 4.5 % off (bitsandbytes #1945).
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    as_stored = any(is_four_bit(module) for module in model.modules())
    return MixedPrecisionPolicy(param_dtype=None if as_stored else dtype, reduce_dtype=torch.float32)
