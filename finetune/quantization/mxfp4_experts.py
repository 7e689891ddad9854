"""Keep the experts of an mxfp4 checkpoint, such as gpt-oss, as they are stored.

An mxfp4 weight has 4 bits (e2m1), and each block of 32 weights has a power of two as its scale (OCP
Microscaling Formats 1.0). bitsandbytes' 4-bit format describes the same values exactly: a table with the 16
values, a table with the 256 scales, and the bytes of the checkpoint. The kernels of NF4 read this format.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter

from finetune.kernels import ops
from finetune.kernels.kernel_limits import STACKED
from finetune.quantization.stacked_experts import Dequantize

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BIAS = 127  # of the exponent that a scale's byte holds


def conversions() -> list[Any]:
    """Return what transformers needs to read blocks and scales as quantized parameters of the experts."""
    return [WeightConverter([f"{name}_blocks", f"{name}_scales"], name, [_Keep()]) for name in STACKED]


class _Keep(ConversionOps):
    """Make a quantized parameter of a weight's blocks [E, out, in / 32, 16] and scales [E, out, in / 32].

    transformers has cast both to the dtype of the model, in which the integers up to 255 are exact.
    """

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *_: object, **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        ends = ("_blocks", "_scales")
        found = {end: tensor for key, tensor in input_dict.items() for end in ends if key.endswith(end)}
        blocks, scales = (found[end][0] if isinstance(found[end], list) else found[end] for end in ends)
        weight = model.get_parameter(name)
        made = quantized(blocks, scales, weight.dtype)
        if made.dequantize_by.shape != weight.shape:  # transformers collects these errors and raises another
            raise ValueError(f"{name} has the shape {made.dequantize_by.shape}, not {weight.shape}")
        return {name: made}


def quantized(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a parameter for `stacked_experts.parametrize_experts`, for a weight [E, in, out]."""
    bytes_ = blocks.to(torch.uint8)
    packed = (bytes_ << 4) | (bytes_ >> 4)  # bitsandbytes has the first weight in the high bits
    experts, outputs, count, half = blocks.shape
    exponents = torch.arange(256, device=blocks.device, dtype=torch.float32) - BIAS
    outer = torch.ones(-(-scales.numel() // ops.NESTED), device=blocks.device)
    values, none = torch.tensor(E2M1, device=blocks.device), torch.zeros(1, device=blocks.device)
    table = torch.cat([values, torch.exp2(exponents), none, outer])
    made: Any = torch.nn.Parameter(packed.view(experts, outputs, count * half), requires_grad=False)
    shape = torch.Size((experts, 2 * count * half, outputs))
    absmax = scales.to(torch.uint8).reshape(-1)
    made.dequantize_by = Dequantize("mxfp4", shape, dtype, [absmax, table], transposed=True)
    return made
