"""Triton kernels for operations that torch and Inductor run slowly. They are only imported on a GPU.

`ops` has the same mathematics in plain torch, and the tests compare both. T is tokens, N outputs, F the
intermediate size, R a rank padded to a power of two (16 or more). A kernel that reads many rows against the
same columns loops over the rows and prefetches them (`tl.range(num_stages)`). With one program per tile, it
reached a third of the memory bandwidth.
"""

# Triton has no type stubs, and pyright takes its constexpr branches for ordinary branches
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

LONGEST_ROW = 32768  # longest row that one program quantizes
THIN_TILE = {"BT": 64, "BN": 128, "STAGES": 4, "WARPS": 4}  # tile of a thin GEMM that runs while rounding
THIN = 64  # largest number of columns of a thin GEMM that is fused with another operation


def on_its_gpu(launch):
    """Make the GPU of the first tensor the current GPU, on which Triton launches."""

    @functools.wraps(launch)
    def launched(first, *others, **named):
        with torch.cuda.device_of(first[0][0] if isinstance(first, list) else first):
            return launch(first, *others, **named)

    return launched


@triton.jit
def _add_product(
    y, t, b, T, N, R: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr
):  # y[T, N] += t[T, R] b[N, R]^T
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)
    ranks = tl.arange(0, R)
    row_ok, col_ok = (rows < T)[:, None], (cols < N)[:, None]
    left = tl.load(t + rows[:, None] * R + ranks[None, :], row_ok, 0.0)
    right = tl.load(b + cols[:, None] * R + ranks[None, :], col_ok, 0.0)
    at = y + rows[:, None] * N + cols[None, :]
    ok = row_ok & (cols < N)[None, :]
    total = tl.load(at, ok, 0.0).to(tl.float32) + tl.dot(left, tl.trans(right), input_precision="tf32x3")
    tl.store(at, total.to(y.dtype.element_ty), ok)


@triton.jit
def _quantize(x, column, amax, codes, scale, N, SCALED: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    step = tl.maximum(tl.load(amax + row) / 448.0, 1.1754943508222875e-38)
    values = tl.load(x + row * N + cols, cols < N, 0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(column + cols, cols < N, 0.0)
    tl.store(codes + row * N + cols, (values / step).to(tl.float8e4nv), cols < N)
    if tl.program_id(1) == 0:
        tl.store(scale + row, step)


@triton.jit
def _quantize_product(
    x, column, amax, b, codes, scale, product, T, N, stride_n, stride_r, R: tl.constexpr,
    SCALED: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows, ranks = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT), tl.arange(0, R)
    step = tl.maximum(tl.load(amax + rows, rows < T, 0.0) / 448.0, 1.1754943508222875e-38)
    total = tl.zeros([BT, R], tl.float32)
    for start in tl.range(0, N, BN, num_stages=STAGES):
        cols = start + tl.arange(0, BN)
        here = cols < N
        at, ok = rows[:, None] * N + cols[None, :], (rows < T)[:, None] & here[None, :]
        block = tl.load(x + at, ok, 0.0)
        right = tl.load(b + cols[:, None] * stride_n + ranks[None, :] * stride_r, here[:, None], 0.0)
        total += tl.dot(block, right, input_precision="tf32x3")
        values = block.to(tl.float32)
        if SCALED:
            values *= tl.load(column + cols, here, 0.0)[None, :]
        tl.store(codes + at, (values / step[:, None]).to(tl.float8e4nv), ok)
    tl.store(scale + rows, step, rows < T)
    tl.store(
        product + rows[:, None] * R + ranks[None, :], total.to(product.dtype.element_ty), (rows < T)[:, None]
    )


@triton.jit
def _quantize_rows(x, column, codes, scale, N, SCALED: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    values = tl.load(x + row * N + cols, cols < N, 0.0).to(tl.float32)
    if SCALED:
        values *= tl.load(column + cols, cols < N, 0.0)
    step = tl.maximum(tl.max(tl.abs(values)) / 448.0, 1.1754943508222875e-38)
    tl.store(codes + row * N + cols, (values / step).to(tl.float8e4nv), cols < N)
    tl.store(scale + row, step)


@triton.jit
def _transpose(source, target, rows, columns, tile: tl.constexpr):
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    source += matrix
    target += matrix
    down = tl.program_id(0) * tile + tl.arange(0, tile)
    across = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    block = tl.load(source + down[:, None].to(tl.int64) * columns + across[None, :], mask=inside)
    at = target + across[:, None].to(tl.int64) * rows + down[None, :]
    tl.store(at, tl.trans(block), mask=tl.trans(inside))


@triton.jit
def _dora_norm(
    w, column, a, b, scaling, norm, OUT, IN, RANK, SCALED: tl.constexpr, R: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    rows, ranks = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, R)
    left = tl.load(b + rows[:, None] * RANK + ranks[None, :], (rows < OUT)[:, None] & (ranks < RANK), 0.0)
    left *= scaling
    if SCALED:
        scale = tl.load(column + rows, rows < OUT, 0.0)
    total = tl.zeros([BT, BN], tl.float32)
    for start in tl.range(0, IN, BN, num_stages=STAGES):
        cols = start + tl.arange(0, BN)
        here = (cols < IN)[None, :]
        block = tl.load(
            w + rows[:, None].to(tl.int64) * IN + cols[None, :], (rows < OUT)[:, None] & here, 0.0
        )
        right = tl.load(a + ranks[:, None] * IN + cols[None, :], (ranks < RANK)[:, None] & here, 0.0)
        values = block.to(tl.float32)
        if SCALED:
            values *= scale[:, None]
        values += tl.dot(left, right, input_precision="tf32x3")  # as exact as a float32 GEMM
        total += values * values
    tl.store(norm + rows, tl.sqrt(tl.sum(total, 1)), rows < OUT)


@triton.jit
def _dequantize(
    packed, absmax, table, out, WORDS, IN_BLOCK: tl.constexpr, NESTED: tl.constexpr, B: tl.constexpr
):  # a word holds 8 weights, or 16 bytes of bf16, which a thread stores at once
    start = tl.program_id(0) * B
    words = start + tl.arange(0, B)
    here = words < WORDS
    codes = tl.load(packed + words, here, 0)
    block = words // IN_BLOCK
    scale = tl.load(absmax + block, here, 0)
    if NESTED:
        outer = tl.load(table + 273 + block // 256, here, 0.0)
        scale = tl.load(table + 16 + scale.to(tl.int32)) * outer + tl.load(table + 272)
    place = tl.arange(0, 8)
    code = (codes[:, None] >> ((place ^ 1) * 4)[None, :]) & 15  # the high bits of a byte come first
    values = tl.load(table + code) * scale[:, None]
    at = out + start.to(tl.int64) * 8 + (tl.arange(0, B) * 8)[:, None] + place[None, :]
    tl.store(at, values.to(out.dtype.element_ty), here[:, None])


@on_its_gpu
def add_product_(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    """Read y once; cuBLAS needs two passes over y."""
    tokens, size = y.shape
    grid = (triton.cdiv(size, 128), triton.cdiv(tokens, 64))
    _add_product[grid](y, t, b, tokens, size, t.shape[1], 64, 128, num_warps=4)


@on_its_gpu
def quantize_product(x, column, amax, b):
    (rows, size), rank = x.shape, b.shape[1]
    codes = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=x.device)
    product = x.new_empty(rows, rank)
    grid = (triton.cdiv(rows, THIN_TILE["BT"]),)
    _quantize_product[grid](
        x, column, amax, b, codes, scale, product, rows, size, b.stride(0), b.stride(1), rank,
        column is not None, THIN_TILE["BT"], THIN_TILE["BN"], THIN_TILE["STAGES"],
        num_warps=THIN_TILE["WARPS"],
    )  # fmt: skip
    return codes, scale, product


@on_its_gpu
def quantize_known(x, column, amax):
    codes = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0], 1, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], 4096))  # the second dimension is limited to 65,535
    _quantize[grid](x, column, amax, codes, scale, x.shape[1], column is not None, 4096, num_warps=8)
    return codes, scale


@on_its_gpu
def quantize_rows(x, column):
    rows, size = x.shape
    codes = torch.empty(rows, size, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(size)
    warps = 4 if block <= 8192 else 8 if block <= 16384 else 16
    _quantize_rows[(rows,)](x, column, codes, scale, size, column is not None, block, num_warps=warps)
    return codes, scale


@on_its_gpu
def transpose_bytes(source: torch.Tensor) -> torch.Tensor:
    """Return a contiguous [..., columns, rows] copy of `source` [..., rows, columns] uint8."""
    *matrices, rows, columns = source.shape
    target = torch.empty(*matrices, columns, rows, dtype=source.dtype, device=source.device)
    _transpose[(triton.cdiv(rows, 128), triton.cdiv(columns, 128), math.prod(matrices))](
        source, target, rows, columns, 128, num_warps=8
    )
    return target


@on_its_gpu
def dora_norm(weight, column, a, b, scaling):
    """Return ||column W + scaling b a|| of each row [out], with one read of W [out, in].

    The other tensors are float32.
    """
    (size, inputs), rank = weight.shape, len(a)
    norm = torch.empty(size, device=weight.device)
    padded = max(16, triton.next_power_of_2(rank))
    # Tiles are in shared memory, and RTX GPUs have 99 KiB. For a bf16 and an fp32 base model (Triton 3.7),
    # the tiles need in KiB: 52 and 76 at rank 16, 32 and 40 at 32, 56 and 64 at 64, 68 and 72 at 128, 65 and
    # 66 at 256
    tile = 32 if padded <= 128 else 16
    columns, stages = min(128, 8192 // padded), 4 if padded == 16 else 2
    _dora_norm[(triton.cdiv(size, tile),)](
        weight, column, a, b, scaling, norm, size, inputs, rank, column is not None, padded, tile, columns,
        stages, num_warps=4,
    )  # fmt: skip
    return norm


@on_its_gpu
def dequantize(groups, dtype):
    """Dequantize all weights of `groups` (packed, absmax, table) into one tensor, at memory bandwidth."""
    rows, columns = [len(packed) for packed, _, _ in groups], 2 * groups[0][0].shape[1]
    out = torch.empty(sum(rows), columns, dtype=dtype, device=groups[0][0].device)
    for (packed, absmax, table), part in zip(groups, out.split(rows), strict=True):
        words = packed.numel() // 4
        _dequantize[(triton.cdiv(words, 512),)](
            packed.view(-1).view(torch.int32), absmax, table, part, words, words // absmax.numel(),
            absmax.dtype == torch.uint8, 512, num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds a scale before it adds the offset
        )  # fmt: skip
    return out
