"""The four grouped GEMMs of a layer's experts: forward and input gradient of both weights, with adapters.

Plain weights are multiplied as they are. Quantized weights are dequantized for each GEMM, or the GEMMs run in
fp8 on a Hopper GPU (`speed.fp8_experts`). An fp8 GEMM multiplies fp8 weights as they are, and rounds 4-bit
weights to fp8 first. It rounds the rows to fp8, as `quantization.fp8_linear` does. The adapters stay in 16
bits. `expert_ops` explains the letters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from finetune.kernels import expert_ops as ops
from finetune.kernels import fp8_expert_ops
from finetune.kernels.kernel_limits import EXPERTS_BLOCK, FP8_MULTIPLE
from finetune.kernels.ops import E4M3, quantize_rows, transpose


class Routing(NamedTuple):
    """The results of `expert_ops.sort_by_expert`, which explains them, and K. All tensors are int32."""

    order: Tensor
    """[N]"""
    places: Tensor
    """[N]"""
    ends: Tensor
    """[E]"""
    tiles: Tensor
    """[N / TILE + E, 3]"""
    each: int
    """K, the experts of a token."""


class StackedWeight(NamedTuple):
    """A stacked weight with an adapter's matrices, as `fused_experts.Experts` holds them."""

    thin: Tensor | None
    """Quantized weights: A1 [E, R, H] or s B2 [E, H, R] in 16 bits, or `None` without an adapter.
    Plain weights: W1 and A1 [E, 2 F + R, H], or W2 and s B2 [E, H, F + R], in 16 or 32 bits."""
    values: Tensor | None
    """The first tensor of a quantized weight (`expert_ops.dequantize_experts`), or `None`. In fp8: W1
    [E, 2 F, H] or W2 [E, H, F] in e4m3."""
    scale: Tensor | None
    """Its scales, or `None`. In fp8: one for each output, [E, 2 F, 1] or [E, H, 1] float32."""
    table: Tensor | None
    """The table of a weight in 4 bits, or `None`."""
    fp8: bool
    """Whether the GEMMs run in fp8."""


def fp8_unsupported_reason(stored: list[Tensor | None], dtype: torch.dtype) -> str:
    """Return why a GPU can't multiply quantized weights in fp8, for rows in `dtype`. Empty if it can.

    Args:
        stored: The tensors of a quantized weight, as `StackedWeight` has them.
    """
    values, _, table = stored
    if values is None or (table is None and values.dtype != E4M3):
        return "the experts are stored in neither fp8 nor 4 bits"
    sizes = values.shape[1], values.shape[2] * (1 if table is None else 2)
    if dtype != torch.bfloat16:
        return f"the GEMMs' rows are in {str(dtype).removeprefix('torch.')}"
    if not fp8_expert_ops.has_kernel(values.device):
        return "the kernels need a GPU of compute capability 9.0 (Hopper)"
    if any(size % FP8_MULTIPLE for size in sizes):
        return f"a size of the experts is no multiple of {FP8_MULTIPLE}"
    if table is not None and sizes[1] % EXPERTS_BLOCK:
        return f"the experts' rows are no multiples of {EXPERTS_BLOCK}"
    return ""


def gate_up(x: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return [x W1^T | x A1^T] of the tokens x [T, H]: [N, 2 F + R] in x's dtype."""
    order, places, ends, tiles, each = routing
    if held.fp8:
        values, scale = _fp8(held)
        codes, scale_of_rows = quantize_rows(x)
        return fp8_expert_ops.fp8_grouped_mm_and_thin(
            codes, scale_of_rows, values, scale, x, held.thin, order, ends, tiles, each, True
        )
    return ops.grouped_mm(ops.rows_of_experts(x, places), _whole(held, True, x), ends, True)


def down(h: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return h W2^T + u (s B2)^T of the rows [h | u] [N, F + R]: [N, H] in h's dtype."""
    if held.fp8:
        values, scale = _fp8(held)
        size = values.shape[2]
        codes, scale_of_rows = fp8_expert_ops.quantize_rows_of_experts(
            h[:, :size], None, None, routing.tiles, 1
        )
        thin = None if held.thin is None else h[:, size:]
        return fp8_expert_ops.fp8_grouped_mm_plus_thin(
            codes, scale_of_rows, values, scale, thin, held.thin, routing.ends, routing.tiles, h.dtype
        )
    return ops.grouped_mm(h, _whole(held, False, h), routing.ends, True)


def down_gradient(dy: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return the gradient of `down`'s rows, [N, F + R] in dy's dtype, without the routing weights.

    Args:
        dy: The gradient of the layer's output [T, H].
    """
    order, places, ends, tiles, each = routing
    if held.fp8:
        values, scale = _fp8(held, after=dy)
        codes, scale_of_rows = fp8_expert_ops.quantize_rows_of_experts(dy, scale, order, tiles, each)
        inner = None if held.thin is None else held.thin.transpose(1, 2)
        return fp8_expert_ops.fp8_grouped_mm_and_thin(
            codes, scale_of_rows, transpose(values), None, dy, inner, order, ends, tiles, each, False
        )
    return ops.grouped_mm(ops.rows_of_experts(dy, places), _whole(held, False, dy, after=dy), ends, False)


def gate_up_gradient(dz: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return the gradient of `gate_up`'s rows of x, [N, H] in dz's dtype.

    Args:
        dz: The gradient of the result of `gate_up`, [N, 2 F + R].
    """
    if held.fp8:
        values, scale = _fp8(held, after=dz)
        size = values.shape[1]
        codes, scale_of_rows = fp8_expert_ops.quantize_rows_of_experts(
            dz[:, :size], scale, None, routing.tiles, 1
        )
        thin, outer = (None, None) if held.thin is None else (dz[:, size:], held.thin.transpose(1, 2))
        return fp8_expert_ops.fp8_grouped_mm_plus_thin(
            codes, scale_of_rows, transpose(values), None, thin, outer, routing.ends, routing.tiles, dz.dtype
        )
    return ops.grouped_mm(dz, _whole(held, True, dz, after=dz), routing.ends, False)


def _fp8(held: StackedWeight, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weight in fp8 with a scale for each output: as it is held, or rounded from 4 bits."""
    assert held.values is not None and held.scale is not None
    if held.table is None:
        return held.values, held.scale
    return fp8_expert_ops.four_bit_to_fp8(held.values, held.scale, held.table, after)


def _whole(held: StackedWeight, below: bool, like: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the weights with the adapter's matrices: dequantized, or as they are held."""
    tensors = [one for one in (held.values, held.scale, held.table) if one is not None]
    if tensors:
        return ops.dequantize_experts(tensors, held.thin, below, like.dtype, after)
    assert held.thin is not None
    return held.thin
