"""The four grouped GEMMs of a layer's experts: forward and input gradient of both weights, with adapters.

Plain weights are multiplied as they are. Quantized weights are dequantized for each GEMM, but fp8 weights on
a Hopper GPU are not. There the rows are rounded to fp8, as in `quantization.fp8_linear`, and the adapters
stay in 16 bits. `expert_ops` explains the letters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from finetune.kernels import expert_ops as ops
from finetune.kernels import fp8_expert_ops
from finetune.kernels.kernel_limits import FP8_MULTIPLE
from finetune.kernels.ops import E4M3, transpose


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
    """Whether GEMMs multiply the fp8 values themselves."""


def runs_in_fp8(values: Tensor | None, dtype: torch.dtype) -> bool:
    """Return whether a GPU multiplies these quantized values themselves, for rows in `dtype`."""
    return (
        values is not None
        and values.dtype == E4M3
        and dtype == torch.bfloat16
        and fp8_expert_ops.has_kernel(values.device)
        and not any(size % FP8_MULTIPLE for size in values.shape[1:])
    )


def gate_up(x: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return [x W1^T | x A1^T] of the tokens x [T, H]: [N, 2 F + R] in x's dtype."""
    order, places, ends, tiles, each = routing
    if held.fp8 and held.values is not None:
        codes, scale = fp8_expert_ops.quantize_rows_of_experts(x, None, order, tiles, each)
        return fp8_expert_ops.fp8_grouped_mm_and_thin(
            codes, scale, held.values, held.scale, x, held.thin, order, ends, tiles, each
        )
    return ops.grouped_mm(ops.rows_of_experts(x, places), _whole(held, True, x), ends, True)


def down(h: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return h W2^T + u (s B2)^T of the rows [h | u] [N, F + R]: [N, H] in h's dtype."""
    if held.fp8 and held.values is not None:
        size = held.values.shape[2]
        codes, scale = fp8_expert_ops.quantize_rows_of_experts(h[:, :size], None, None, routing.tiles, 1)
        thin = None if held.thin is None else h[:, size:]
        return fp8_expert_ops.fp8_grouped_mm_plus_thin(
            codes, scale, held.values, held.scale, thin, held.thin, routing.ends, routing.tiles, h.dtype
        )
    return ops.grouped_mm(h, _whole(held, False, h), routing.ends, True)


def down_gradient(dy: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return the gradient of `down`'s rows, [N, F + R] in dy's dtype, without the routing weights.

    Args:
        dy: The gradient of the layer's output [T, H].
    """
    order, places, ends, tiles, each = routing
    if held.fp8 and held.values is not None and held.scale is not None:
        codes, scale = fp8_expert_ops.quantize_rows_of_experts(dy, held.scale, order, tiles, each)
        inner = None if held.thin is None else held.thin.transpose(1, 2)
        return fp8_expert_ops.fp8_grouped_mm_and_thin(
            codes, scale, transpose(held.values), None, dy, inner, order, ends, tiles, each
        )
    return ops.grouped_mm(ops.rows_of_experts(dy, places), _whole(held, False, dy, after=dy), ends, False)


def gate_up_gradient(dz: Tensor, held: StackedWeight, routing: Routing) -> Tensor:
    """Return the gradient of `gate_up`'s rows of x, [N, H] in dz's dtype.

    Args:
        dz: The gradient of the result of `gate_up`, [N, 2 F + R].
    """
    if held.fp8 and held.values is not None and held.scale is not None:
        size = held.values.shape[1]
        codes, scale = fp8_expert_ops.quantize_rows_of_experts(
            dz[:, :size], held.scale, None, routing.tiles, 1
        )
        thin, outer = (None, None) if held.thin is None else (dz[:, size:], held.thin.transpose(1, 2))
        return fp8_expert_ops.fp8_grouped_mm_plus_thin(
            codes, scale, transpose(held.values), None, thin, outer, routing.ends, routing.tiles, dz.dtype
        )
    return ops.grouped_mm(dz, _whole(held, True, dz, after=dz), routing.ends, False)


def _whole(held: StackedWeight, below: bool, like: Tensor, after: Tensor | None = None) -> Tensor:
    """Return the weights with the adapter's matrices: dequantized, or as they are held."""
    tensors = [one for one in (held.values, held.scale, held.table) if one is not None]
    if tensors:
        return ops.dequantize_experts(tensors, held.thin, below, like.dtype, after)
    assert held.thin is not None
    return held.thin
