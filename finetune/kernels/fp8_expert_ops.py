"""The operators of experts in fp8: rounding of rows, and grouped GEMMs with an adapter's thin GEMMs.

`expert_ops` explains the letters, the results of `sort_by_expert` (`order`, `ends` and `tiles`), and how
operators run on a GPU and on a CPU. `each` is K. Experts are e4m3 [E, out, in] with a float32 scale for each
output.

An fp8 GEMM sums over the last dimension of both matrices, so the gradient of the input needs a transposed
copy of the weights. The gradient is multiplied with the weights' scales before it is rounded, as in
`quantization.fp8_linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from finetune.hardware import detection
from finetune.kernels import ops
from finetune.kernels.expert_ops import dequantize_experts, multiply_tiles
from finetune.kernels.kernel_limits import FP8_EXPERTS_CAPABILITY
from finetune.kernels.registration import operator, shapes_of

triton_fp8_experts: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_fp8_experts


def has_kernel(device: torch.device) -> bool:
    """Return whether the GPU has the kernels of this module."""
    return device.type == "cuda" and detection.capability(device) == FP8_EXPERTS_CAPABILITY


@operator(
    "four_bit_to_fp8(Tensor packed, Tensor absmax, Tensor table, Tensor? after=None) -> (Tensor, Tensor)"
)
def four_bit_to_fp8(
    packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, after: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the stacked 4-bit weights of experts [E, out, in] to fp8, for GEMMs.

    Args:
        packed: [E, out, in / 2] uint8, with `absmax` and `table` as `expert_ops.dequantize_experts` has them.
            Each block of weights lies in one row.
        after: As in `expert_ops.dequantize_experts`.

    Returns:
        codes: [E, out, in] e4m3.
        scale: One for each output [E, out, 1] in float32.
    """
    if packed.is_cuda:
        return triton_fp8_experts.four_bit_to_fp8(packed, absmax, table)
    weight = dequantize_experts([packed, absmax, table], None, True, torch.float32)
    codes, scale = ops.quantize_rows(weight.flatten(0, 1))
    return codes.view(weight.shape), scale.view(*weight.shape[:2], 1)


@shapes_of("four_bit_to_fp8")
def _(
    packed: torch.Tensor, absmax: object, table: object, after: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    experts, outputs, inputs = packed.shape
    codes = packed.new_empty(experts, outputs, 2 * inputs, dtype=ops.E4M3)
    return codes, packed.new_empty(experts, outputs, 1, dtype=torch.float32)


@operator(
    "quantize_rows_of_experts(Tensor x, Tensor? column, Tensor? order, Tensor tiles, int each) -> "
    "(Tensor, Tensor)"
)
def quantize_rows_of_experts(
    x: torch.Tensor, column: torch.Tensor | None, order: torch.Tensor | None, tiles: torch.Tensor, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of each expert to fp8, as `ops.quantize_rows` does.

    Args:
        x: Rows [N, in] that are sorted by expert, or tokens [T, in] with `order`. The rows may have a stride.
        column: A factor for each column of an expert's rows [E, in, 1] in float32, or `None`.
        order: As in `expert_ops`, or `None` for sorted rows.

    Returns:
        codes: [N, in] e4m3, sorted by expert.
        scale: [N, 1] float32.
    """
    if x.is_cuda:
        return triton_fp8_experts.quantize_rows_of_experts(x, column, order, tiles, each)
    rows = x if order is None else x[order.long() // each]
    if column is not None:
        rows = rows.float().clone()
        for expert, first, end in tiles.tolist():
            rows[first:end] *= column[expert, :, 0]
    return ops.quantize_rows(rows)


@shapes_of("quantize_rows_of_experts")
def _(
    x: torch.Tensor, column: object, order: torch.Tensor | None, tiles: object, each: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0] if order is None else order.shape[0]
    codes = x.new_empty(rows, x.shape[1], dtype=ops.E4M3)
    return codes, x.new_empty(rows, 1, dtype=torch.float32)


@operator(
    "fp8_grouped_mm_and_thin(Tensor codes, Tensor scale, Tensor weight, Tensor? weight_scale, Tensor x, "
    "Tensor? inner, Tensor order, Tensor ends, Tensor tiles, int each, bool of_tokens) -> Tensor"
)
def fp8_grouped_mm_and_thin(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    x: torch.Tensor,
    inner: torch.Tensor | None,
    order: torch.Tensor,
    ends: torch.Tensor,
    tiles: torch.Tensor,
    each: int,
    of_tokens: bool,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weight, and put the rows of x times `inner`^T behind it.

    Args:
        codes: The quantized rows [N, in], with their `scale` [N, 1]. With `of_tokens`: the quantized tokens
            [T, in], with their `scale` [T, 1].
        weight: [E, out, in] e4m3, with the scale of each output [E, out, 1], or `None` for 1.
        x: The tokens [T, in] that the rows belong to.
        inner: Matrices of an adapter [E, R, in] in x's dtype, or `None`.

    Returns:
        [N, out + R] in x's dtype.
    """
    rank = 0 if inner is None else inner.shape[1]
    if x.is_cuda:
        sorting = (order, each, ends) if of_tokens else (None, 0, ends)
        out = triton_fp8_experts.fp8_grouped_mm(
            codes, scale, weight, weight_scale, sorting, None, None, rank, x.dtype
        )
        if inner is not None:
            behind = out[:, weight.shape[1] :]
            triton_fp8_experts.thin_rows_(behind, x, inner, order, tiles, each)
        return out
    token = order.long() // each
    if of_tokens:
        codes, scale = codes[token], scale[token]
    out = _product(codes, scale, weight, weight_scale, tiles).to(x.dtype)
    if inner is None:
        return out
    thin = multiply_tiles(x[token], inner.transpose(1, 2), tiles)
    return torch.cat([out, thin.to(x.dtype)], dim=1)


@shapes_of("fp8_grouped_mm_and_thin")
def _(
    codes: torch.Tensor,
    scale: object,
    weight: torch.Tensor,
    weight_scale: object,
    x: torch.Tensor,
    inner: torch.Tensor | None,
    order: torch.Tensor,
    ends: object,
    tiles: object,
    each: int,
    of_tokens: bool,
) -> torch.Tensor:
    return x.new_empty(order.shape[0], weight.shape[1] + (0 if inner is None else inner.shape[1]))


@operator(
    "fp8_grouped_mm_plus_thin(Tensor codes, Tensor scale, Tensor weight, Tensor? weight_scale, Tensor? thin, "
    "Tensor? outer, Tensor ends, Tensor tiles, ScalarType dtype) -> Tensor"
)
def fp8_grouped_mm_plus_thin(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    thin: torch.Tensor | None,
    outer: torch.Tensor | None,
    ends: torch.Tensor,
    tiles: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weight, and add thin outer^T: [N, out] in `dtype`.

    Args:
        codes: The quantized rows [N, in], with their `scale` [N, 1].
        weight: [E, out, in] e4m3, with the scale of each output [E, out, 1], or `None` for 1.
        thin: [N, R], whose rows may have a stride, or `None`.
        outer: Matrices of an adapter [E, out, R], or `None`.
    """
    if codes.is_cuda:
        return triton_fp8_experts.fp8_grouped_mm(
            codes, scale, weight, weight_scale, (None, 0, ends), thin, outer, 0, dtype
        )
    out = _product(codes, scale, weight, weight_scale, tiles)
    if thin is not None and outer is not None:
        out = out + multiply_tiles(thin, outer.transpose(1, 2), tiles)
    return out.to(dtype)


@shapes_of("fp8_grouped_mm_plus_thin")
def _(
    codes: torch.Tensor,
    scale: object,
    weight: torch.Tensor,
    weight_scale: object,
    thin: object,
    outer: object,
    ends: object,
    tiles: object,
    dtype: torch.dtype,
) -> torch.Tensor:
    return codes.new_empty(codes.shape[0], weight.shape[1], dtype=dtype)


def _product(
    codes: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    tiles: torch.Tensor,
) -> torch.Tensor:
    wide = weight.float() if weight_scale is None else weight.float() * weight_scale
    return multiply_tiles(codes.float(), wide.transpose(1, 2), tiles) * scale
