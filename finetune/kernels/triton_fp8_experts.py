"""Triton kernels of the fp8 GEMMs of a mixture of experts; only imported where there is a GPU.

`fp8_expert_ops` has the same operators in plain torch, which the tests compare with.
"""

# Triton has no type stubs, and pyright takes its constexpr branches for ordinary branches
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from finetune.kernels.triton_experts import TILE, _tile, dequantize
from finetune.kernels.triton_linear import on_its_gpu
from finetune.kernels.triton_mlp import _dot

# An H200 with 131,072 rows, 128 experts, H = 2048 and F = 768 reaches 1,100 TFLOP/s for gate and up, and 740
# for down. Tiles of 128 x 128 reach 940 and 540, and torch's grouped GEMM in bf16 650 and 570.
PRODUCT = {"BM": 128, "BN": 256, "BK": 128, "STAGES": 3, "WARPS": 8}
THIN = {"BK": 128, "STAGES": 3, "WARPS": 4}
ROUNDED = 8192  # values that one program rounds


@triton.jit
def _rows_of(ends, E, number, EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Expert, first row and end of a tile, by its number. A tile after the last one is empty."""
    every = tl.arange(0, EXPERTS)
    real = every < E
    end = tl.load(ends + every, real, 0)
    start = tl.load(ends + every - 1, real & (every > 0), 0)
    count = tl.where(real, (end - start + BM - 1) // BM, 0)
    until = tl.cumsum(count, 0)
    expert = tl.sum((until <= number).to(tl.int32), 0)
    mine = every == expert
    first = tl.sum(tl.where(mine, start + (number - (until - count)) * BM, 0), 0)
    return expert.to(tl.int64), first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _fp8_grouped_mm(
    codes, scale, weight, weight_scale, order, ends, thin, outer, out, E, N, K, stride_thin, expert_outer,
    row_outer, column_outer, stride_out, EACH: tl.constexpr, EXPERTS: tl.constexpr, SCALED: tl.constexpr,
    R: tl.constexpr, ADDED: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """EACH is 0 for rows that are sorted by expert. Otherwise they are tokens."""
    tiles = tl.cdiv(N, BN)
    expert, first, end = _rows_of(ends, E, tl.program_id(0) // tiles, EXPERTS, BM)
    if first < end:
        rows = first + tl.arange(0, BM)
        inside = rows < end
        cols = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
        here = cols < N
        inner = tl.arange(0, BK)
        source = tl.load(order + rows, inside, 0) // EACH if EACH else rows
        left = codes + source.to(tl.int64)[:, None] * K + inner[None, :]
        right = weight + (expert * N + cols[None, :]) * K + inner[:, None]
        total = tl.zeros([BM, BN], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            if WHOLE:
                x, w = tl.load(left, inside[:, None], 0.0), tl.load(right, here[None, :], 0.0)
            else:
                some = start + inner < K
                x = tl.load(left, inside[:, None] & some[None, :], 0.0)
                w = tl.load(right, here[None, :] & some[:, None], 0.0)
            total = tl.dot(x, w, total)
            left += BK
            right += BK
        total *= tl.load(scale + source, inside, 0.0)[:, None]
        if SCALED:
            total *= tl.load(weight_scale + expert * N + cols, here, 0.0)[None, :]
        if ADDED:
            ranks = tl.arange(0, R)
            t = tl.load(
                thin + rows.to(tl.int64)[:, None] * stride_thin + ranks[None, :], inside[:, None], 0.0
            )
            at = outer + expert * expert_outer + cols[None, :] * row_outer + ranks[:, None] * column_outer
            total += _dot(t, tl.load(at, here[None, :], 0.0))
        at = out + rows.to(tl.int64)[:, None] * stride_out + cols[None, :]
        tl.store(at, total.to(out.dtype.element_ty), inside[:, None] & here[None, :])


@triton.jit
def _thin_rows(
    x, inner, order, tiles, out, K, stride_x, expert_inner, rank_inner, column_inner, stride_out,
    EACH: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(tiles)
    if first < end:
        rows, ranks = first + tl.arange(0, ROWS), tl.arange(0, R)
        inside = rows < end
        source = (tl.load(order + rows, inside, 0) // EACH).to(tl.int64)
        total = tl.zeros([ROWS, R], tl.float32)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            cols = start + tl.arange(0, BK)
            here = cols < K
            values = tl.load(
                x + source[:, None] * stride_x + cols[None, :], inside[:, None] & here[None, :], 0.0
            )
            at = inner + expert * expert_inner + cols[:, None] * column_inner + ranks[None, :] * rank_inner
            total += _dot(values, tl.load(at, here[:, None], 0.0))
        at = out + rows.to(tl.int64)[:, None] * stride_out + ranks[None, :]
        tl.store(at, total.to(out.dtype.element_ty), inside[:, None])


@triton.jit
def _quantize_rows_of_experts(
    x, column, order, tiles, codes, scale, K, stride_x, SCALED: tl.constexpr, GATHER: tl.constexpr,
    EACH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(tiles)
    rows = first + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = rows < end
    source = (tl.load(order + rows, inside, 0) // EACH if GATHER else rows).to(tl.int64)
    cols = tl.arange(0, BN)
    here = cols < K
    ok = inside[:, None] & here[None, :]
    values = tl.load(x + source[:, None] * stride_x + cols[None, :], ok, 0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(column + expert * K + cols, here, 0.0)[None, :]
    step = tl.maximum(tl.max(tl.abs(values), 1) / 448.0, 1.1754943508222875e-38)
    at = codes + rows.to(tl.int64)[:, None] * K + cols[None, :]
    tl.store(at, (values / step[:, None]).to(tl.float8e4nv), ok)
    tl.store(scale + rows, step, inside)


@triton.jit
def _steps_of_rows(
    absmax, table, steps, rows_in_all, BLOCKS: tl.constexpr, NESTED: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The largest weight of each row is the largest scale of its blocks, because the largest code is 1."""
    rows, blocks = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BN)
    inside = rows < rows_in_all
    here = inside[:, None] & (blocks < BLOCKS)[None, :]
    block = rows[:, None] * BLOCKS + blocks[None, :]
    scale = tl.load(absmax + block, here, 0)
    if NESTED:
        outer = tl.load(table + 273 + block // 256, here, 0.0)
        scale = tl.load(table + 16 + scale.to(tl.int32)) * outer + tl.load(table + 272)
    largest = tl.max(tl.where(here, tl.abs(scale), 0.0), 1)
    tl.store(steps + rows, tl.maximum(largest / 448.0, 1.1754943508222875e-38), inside)


@on_its_gpu
def four_bit_to_fp8(packed, absmax, table):
    experts, outputs, _ = packed.shape
    rows = experts * outputs
    blocks = absmax.numel() // rows
    scale = torch.empty(experts, outputs, 1, device=packed.device)
    block = triton.next_power_of_2(blocks)
    together = max(1, ROUNDED // 2 // block)  # rows of a program
    _steps_of_rows[(triton.cdiv(rows, together),)](
        absmax, table, scale, rows, blocks, absmax.dtype == torch.uint8, together, block, num_warps=4,
        enable_fp_fusion=False,  # bitsandbytes rounds a scale before it adds the offset
    )  # fmt: skip
    return dequantize([packed, absmax, table], None, True, torch.float8_e4m3fn, scale), scale


@on_its_gpu
def quantize_rows_of_experts(x, column, order, tiles, each):
    rows, size = len(x) if order is None else len(order), x.shape[1]
    codes = torch.empty(rows, size, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(size)
    together = max(1, min(TILE, ROUNDED // block))  # rows of a program
    _quantize_rows_of_experts[(len(tiles), TILE // together)](
        x, column, order, tiles, codes, scale, size, x.stride(0), column is not None, order is not None, each,
        together, block, num_warps=8,
    )  # fmt: skip
    return codes, scale


@on_its_gpu
def fp8_grouped_mm(codes, scale, weight, weight_scale, sorting, thin, outer, behind, dtype):
    """Return [N, out + behind]. The last `behind` columns are not written.

    Args:
        sorting: `order`, K and `ends` for quantized tokens. `None`, 0 and `ends` for quantized rows.
    """
    (order, each, ends), inputs, (experts, outputs, _) = sorting, codes.shape[1], weight.shape
    rows = len(order) if each else len(codes)
    out = torch.empty(rows, outputs + behind, device=codes.device, dtype=dtype)
    tile, strides = PRODUCT, (0, 0, 0) if outer is None else outer.stride()
    grid = ((triton.cdiv(rows, tile["BM"]) + experts) * triton.cdiv(outputs, tile["BN"]),)
    _fp8_grouped_mm[grid](
        codes, scale, weight, weight_scale, order, ends, thin, outer, out, experts, outputs, inputs,
        0 if thin is None else thin.stride(0), *strides, out.stride(0), each,
        triton.next_power_of_2(experts), weight_scale is not None, 16 if outer is None else outer.shape[2],
        outer is not None, inputs % tile["BK"] == 0, tile["BM"], tile["BN"], tile["BK"], tile["STAGES"],
        num_warps=tile["WARPS"],
    )  # fmt: skip
    return out


@on_its_gpu
def thin_rows_(out, x, inner, order, tiles, each):
    """Write the rows of x, each times its expert's `inner` [E, R, in], to the columns `out` [N, R]."""
    tile = THIN
    _thin_rows[(len(tiles),)](
        x, inner, order, tiles, out, x.shape[1], x.stride(0), *inner.stride(), out.stride(0), each,
        inner.shape[1], TILE, tile["BK"], tile["STAGES"], num_warps=tile["WARPS"],
    )  # fmt: skip
