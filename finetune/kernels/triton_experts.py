"""Triton kernels of a mixture of experts; only imported where there is a GPU.

`expert_ops` has the same operators in plain torch, which the tests compare with, and explains the letters.
"""

# Triton has no type stubs, and pyright takes its constexpr branches for ordinary branches
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from finetune.kernels.triton_linear import on_its_gpu
from finetune.kernels.triton_mlp import _act, _dot

# Columns of a tile, loads in flight and warps. An H100 with F = 768, R = 16 and 131,072 rows takes 0.26 ms
# forward and 0.58 ms backward. Without adapters it takes 0.24 ms and 0.39 ms.
FORWARD = {"BN": 64, "STAGES": 3, "WARPS": 4}
WIDE_FORWARD = {"BN": 32, "STAGES": 2, "WARPS": 4}  # for ranks above THIN, whose columns fill shared memory
BACKWARD = {"BN": 32, "STAGES": 3, "WARPS": 4}
WIDE_BACKWARD = {"BN": 32, "STAGES": 2, "WARPS": 4}
PLAIN_BACKWARD = {"BN": 64, "STAGES": 2, "WARPS": 8}  # without adapters
PRODUCT = {"ROWS": 64, "BN": 128, "STAGES": 3, "WARPS": 4}
THIN = 32
TILE = 64  # `expert_ops.TILE`


@triton.jit
def _places(order, narrow, places, N, BN: tl.constexpr):
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    here = rows < N
    index = tl.load(order + rows, here, 0).to(tl.int32)
    tl.store(narrow + rows, index, here)
    tl.store(places + index, rows, here)


@triton.jit
def _before(found, expert, N, STEPS: tl.constexpr):
    """The number of rows of the experts before `expert`, by binary search in the sorted experts."""
    low, high = tl.zeros_like(expert), tl.zeros_like(expert) + N
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        less = (low < high) & (tl.load(found + middle, middle < N, 0).to(tl.int32) < expert)
        high = tl.where(less | (low >= high), high, middle)
        low = tl.where(less, middle + 1, low)
    return low


@triton.jit
def _ends_and_tiles(
    found, ends, tiles, N, E, TILES, STEPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr
):
    expert = tl.arange(0, EXPERTS)
    real = expert < E
    start, end = _before(found, expert, N, STEPS), _before(found, expert + 1, N, STEPS)
    tl.store(ends + expert, end, real)
    count = tl.where(real, (end - start + ROWS - 1) // ROWS, 0)
    until = tl.cumsum(count, 0)
    for one in range(0, tl.max(count, 0)):
        at = tiles + (until - count + one) * 3
        first, here = start + one * ROWS, one < count
        tl.store(at, expert, here)
        tl.store(at + 1, first, here)
        tl.store(at + 2, tl.minimum(first + ROWS, end), here)
    total = tl.sum(count, 0)
    for begin in range(total, TILES, EXPERTS):  # tiles after the last expert are empty
        tile = begin + expert
        at, here = tiles + tile * 3, tile < TILES
        tl.store(at, tl.zeros_like(tile) + E - 1, here)
        tl.store(at + 1, N + (tile - total) * ROWS, here)
        tl.store(at + 2, tl.zeros_like(tile), here)


@triton.jit
def _rows_of_experts(x, places, out, H, K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    values = tl.load(x + token * H + cols, cols < H, 0.0)
    for one in tl.static_range(K):
        place = tl.load(places + token * K + one).to(tl.int64)
        tl.store(out + place * H + cols, values, cols < H)


@triton.jit
def _sum_of_experts(rows, places, weights, out, H, K: tl.constexpr, WEIGHTED: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for one in tl.static_range(K):
        place = tl.load(places + token * K + one).to(tl.int64)
        values = tl.load(rows + place * H + cols, cols < H, 0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * K + one).to(tl.float32)
        total += values
    tl.store(out + token * H + cols, total.to(out.dtype.element_ty), cols < H)


@triton.jit
def _tile(tiles):
    """Expert, first row and end of this program's tile."""
    at = tiles + tl.program_id(0) * 3
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _two_halves(z, at, at_b, b, t, cols, ok, here, F, R: tl.constexpr, ADAPTED: tl.constexpr):
    """Load gate and up in float32, and the columns of the adapter's outer matrix, [BN, R] each."""
    gate = tl.load(z + at + cols[None, :], ok, 0.0).to(tl.float32)
    up = tl.load(z + at + F + cols[None, :], ok, 0.0).to(tl.float32)
    if ADAPTED:
        of_gate = b + (at_b + cols[:, None]) * R + tl.arange(0, R)[None, :]
        b_gate, b_up = tl.load(of_gate, here[:, None], 0.0), tl.load(of_gate + F * R, here[:, None], 0.0)
        gate, up = gate + _dot(t, tl.trans(b_gate)), up + _dot(t, tl.trans(b_up))
    else:
        b_gate, b_up = 0.0, 0.0
    return gate, up, b_gate, b_up


@triton.jit
def _activate(
    z, b, a, tiles, out, F, R: tl.constexpr, ADAPTED: tl.constexpr, R_DOWN: tl.constexpr,
    ADAPTED_DOWN: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(tiles)
    if first < end:
        rows = first + tl.arange(0, ROWS)
        inside = (rows < end)[:, None]
        rows = rows.to(tl.int64)
        ranks, ranks_down = tl.arange(0, R), tl.arange(0, R_DOWN)
        at = rows[:, None] * (2 * F + (R if ADAPTED else 0))
        at_out = rows[:, None] * (F + (R_DOWN if ADAPTED_DOWN else 0))
        t = tl.load(z + at + 2 * F + ranks[None, :], inside, 0.0) if ADAPTED else 0.0
        u = tl.zeros([ROWS, R_DOWN], tl.float32)
        for start in tl.range(0, F, BN, num_stages=STAGES):
            cols = start + tl.arange(0, BN)
            here = cols < F
            ok = inside & here[None, :]
            gate, up, _, _ = _two_halves(z, at, expert * 2 * F, b, t, cols, ok, here, F, R, ADAPTED)
            value, _ = _act(gate, GELU)
            h = (value * up).to(out.dtype.element_ty)
            tl.store(out + at_out + cols[None, :], h, ok)
            if ADAPTED_DOWN:
                inner = a + (expert * R_DOWN + ranks_down[:, None]) * F + cols[None, :]
                u += _dot(h, tl.trans(tl.load(inner, here[None, :], 0.0)))
        if ADAPTED_DOWN:
            tl.store(out + at_out + F + ranks_down[None, :], u.to(out.dtype.element_ty), inside)


@triton.jit
def _activate_backward(
    z, b, a, grad, weights, order, tiles, dz, kept, thin, dweights, F, R: tl.constexpr, ADAPTED: tl.constexpr,
    R_DOWN: tl.constexpr, ADAPTED_DOWN: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert, first, end = _tile(tiles)
    if first < end:
        rows = first + tl.arange(0, ROWS)
        real = rows < end
        inside = real[:, None]
        place = tl.load(order + rows, real, 0)
        weight = tl.load(weights + place, real, 0.0).to(tl.float32)
        rows = rows.to(tl.int64)
        ranks, ranks_down = tl.arange(0, R), tl.arange(0, R_DOWN)
        at = rows[:, None] * (2 * F + (R if ADAPTED else 0))
        at_grad = rows[:, None] * (F + (R_DOWN if ADAPTED_DOWN else 0))
        t = tl.load(z + at + 2 * F + ranks[None, :], inside, 0.0) if ADAPTED else 0.0
        dweight = tl.zeros([ROWS], tl.float32)
        dt, u = tl.zeros([ROWS, R], tl.float32), tl.zeros([ROWS, R_DOWN], tl.float32)
        if ADAPTED_DOWN:
            du = tl.load(grad + at_grad + F + ranks_down[None, :], inside, 0.0).to(tl.float32)
            weighted = (du * weight[:, None]).to(dz.dtype.element_ty)
        for start in tl.range(0, F, BN, num_stages=STAGES):
            cols = start + tl.arange(0, BN)
            here = cols < F
            ok = inside & here[None, :]
            g = tl.load(grad + at_grad + cols[None, :], ok, 0.0).to(tl.float32)
            gate, up, b_gate, b_up = _two_halves(z, at, expert * 2 * F, b, t, cols, ok, here, F, R, ADAPTED)
            value, slope = _act(gate, GELU)
            h = (value * up).to(dz.dtype.element_ty)
            dweight += tl.sum(g * (value * up), 1)
            g *= weight[:, None]
            if ADAPTED_DOWN:
                inner = tl.load(
                    a + (expert * R_DOWN + ranks_down[:, None]) * F + cols[None, :], here[None, :], 0.0
                )
                g += _dot(weighted, inner)
                u += _dot(h, tl.trans(inner))
                tl.store(kept + rows[:, None] * F + cols[None, :], h, ok)
            dgate, dup = (g * up * slope).to(dz.dtype.element_ty), (g * value).to(dz.dtype.element_ty)
            tl.store(dz + at + cols[None, :], dgate, ok)
            tl.store(dz + at + F + cols[None, :], dup, ok)
            if ADAPTED:
                dt += _dot(dgate, b_gate) + _dot(dup, b_up)
        if ADAPTED:
            tl.store(dz + at + 2 * F + ranks[None, :], dt.to(dz.dtype.element_ty), inside)
        if ADAPTED_DOWN:
            dweight += tl.sum(du * u, 1)
            behind = thin + rows[:, None] * 2 * R_DOWN + ranks_down[None, :]
            tl.store(behind, weighted, inside)
            tl.store(behind + R_DOWN, (u * weight[:, None]).to(dz.dtype.element_ty), inside)
        tl.store(dweights + place, dweight, real)


@triton.jit
def _product_of_experts(
    left, right, ends, order, out, columns, stride_left, stride_right, R: tl.constexpr, K: tl.constexpr,
    GATHER: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    first = tl.load(ends + expert - 1, expert > 0, 0)
    end = tl.load(ends + expert)
    cols, ranks = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, R)
    here = (cols < columns)[None, :]
    total = tl.zeros([R, BN], tl.float32)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = rows < end
        source = tl.load(order + rows, inside, 0) // K if GATHER else rows
        thin = tl.load(left + rows.to(tl.int64)[:, None] * stride_left + ranks[None, :], inside[:, None], 0.0)
        wide = tl.load(
            right + source.to(tl.int64)[:, None] * stride_right + cols[None, :], inside[:, None] & here, 0.0
        )
        total += _dot(tl.trans(thin), wide)
    at = (expert.to(tl.int64) * R + ranks)[:, None] * columns + cols[None, :]
    tl.store(out + at, total, here)


@triton.jit
def _dequantize(
    stored, scales, table, steps, out, WORDS, OUT: tl.constexpr, IN_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr, EXPERT, ROW, FOUR_BIT: tl.constexpr, NESTED: tl.constexpr,
    STEPPED: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A word holds 8 weights of one row, which are divided by the row's step. EXPERT and ROW are the strides
    of `out`."""
    words = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    here = words < WORDS
    row = words // IN_WORDS
    place = tl.arange(0, 8)
    if FOUR_BIT:
        codes = tl.load(stored + words, here, 0)
        block = words // BLOCK_WORDS
        scale = tl.load(scales + block, here, 0)
        if NESTED:
            outer = tl.load(table + 273 + block // 256, here, 0.0)
            scale = tl.load(table + 16 + scale.to(tl.int32)) * outer + tl.load(table + 272)
        if STEPPED:
            scale /= tl.load(steps + row, here, 1.0)
        values = tl.load(table + ((codes[:, None] >> ((place ^ 1) * 4)[None, :]) & 15))
    else:
        scale = tl.load(scales + row, here, 0.0)
        values = tl.load(stored + (words * 8)[:, None] + place[None, :], here[:, None], 0.0).to(tl.float32)
    expert = row // OUT
    at = expert * EXPERT + (row - expert * OUT) * ROW + (words - row * IN_WORDS) * 8
    values = (values * scale[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] + place[None, :], values, here[:, None])


@on_its_gpu
def dequantize(stored, thin, below, dtype, steps=None):
    """Do what `expert_ops.dequantize_experts` does. `steps` [E, out, 1] divides the rows of 4-bit weights."""
    values, scales = stored[:2]
    four_bit = len(stored) == 3
    experts, outputs, inputs = values.shape
    inputs *= 2 if four_bit else 1
    rows, columns = outputs, inputs
    if thin is not None:
        rows, columns = (rows + thin.shape[1], columns) if below else (rows, columns + thin.shape[2])
    out = torch.empty(experts, rows, columns, device=values.device, dtype=dtype)
    words = experts * outputs * inputs // 8
    flat = values.view(-1).view(torch.int32) if four_bit else values
    table = stored[2] if four_bit else scales
    _dequantize[(triton.cdiv(words, 512),)](
        flat, scales, table, steps, out, words, outputs, inputs // 8, words // scales.numel(), out.stride(0),
        out.stride(1), four_bit, scales.dtype == torch.uint8, steps is not None, 512, num_warps=4,
        enable_fp_fusion=False,  # bitsandbytes rounds a scale before it adds the offset
    )  # fmt: skip
    if thin is not None:
        (out[:, outputs:] if below else out[:, :, inputs:]).copy_(thin)
    return out


@on_its_gpu
def places_of_experts(found, order, experts):
    """Return what `expert_ops.sort_by_expert` returns, from the sorted experts and their stable order."""
    rows = len(order)
    narrow, places = (torch.empty(rows, device=order.device, dtype=torch.int32) for _ in range(2))
    ends = torch.empty(experts, device=order.device, dtype=torch.int32)
    tiles = torch.empty(rows // TILE + experts, 3, device=order.device, dtype=torch.int32)
    _places[(triton.cdiv(rows, 1024),)](order, narrow, places, rows, 1024, num_warps=4)
    steps = rows.bit_length() + 1
    _ends_and_tiles[(1,)](
        found, ends, tiles, rows, experts, len(tiles), steps, triton.next_power_of_2(experts), TILE
    )
    return narrow, places, ends, tiles


@on_its_gpu
def rows_of_experts(x, places):
    (tokens, width), each = x.shape, len(places) // len(x)
    out = torch.empty(len(places), width, device=x.device, dtype=x.dtype)
    block = min(2048, triton.next_power_of_2(width))
    _rows_of_experts[(tokens, triton.cdiv(width, block))](x, places, out, width, each, block, num_warps=4)
    return out


@on_its_gpu
def sum_of_experts(rows, places, weights, tokens):
    width, each = rows.shape[1], len(places) // tokens
    out = torch.empty(tokens, width, device=rows.device, dtype=rows.dtype)
    block = min(1024, triton.next_power_of_2(width))
    _sum_of_experts[(tokens, triton.cdiv(width, block))](
        rows, places, weights, out, width, each, weights is not None, block, num_warps=4
    )
    return out


def _ranks(b, a):
    """Rank and whether there is one, of both adapters."""
    return (
        16 if b is None else b.shape[2],
        b is not None,
        16 if a is None else a.shape[1],
        a is not None,
    )


@on_its_gpu
def activate(z, b, a, tiles, size, act):
    ranks = _ranks(b, a)
    out = torch.empty(len(z), size + ranks[2] * ranks[3], device=z.device, dtype=z.dtype)
    tile = FORWARD if max(ranks[0], ranks[2]) <= THIN else WIDE_FORWARD
    _activate[(len(tiles),)](
        z, b, a, tiles, out, size, *ranks, act == "gelu_tanh", TILE, tile["BN"], tile["STAGES"],
        num_warps=tile["WARPS"],
    )  # fmt: skip
    return out


@on_its_gpu
def activate_backward(z, b, a, grad, weights, order, tiles, size, act):
    ranks, adapted = _ranks(b, a), a is not None
    dz, dweights = torch.empty_like(z), torch.empty(weights.shape, device=z.device)
    kept = torch.empty((len(z), size) if adapted else 0, device=z.device, dtype=z.dtype)
    thin = torch.empty((len(z), 2 * ranks[2]) if adapted else 0, device=z.device, dtype=z.dtype)
    tile = BACKWARD if max(ranks[0], ranks[2]) <= THIN else WIDE_BACKWARD
    tile = tile if ranks[1] or ranks[3] else PLAIN_BACKWARD
    _activate_backward[(len(tiles),)](
        z, b, a, grad, weights, order, tiles, dz, kept, thin, dweights, size, *ranks, act == "gelu_tanh",
        TILE, tile["BN"], tile["STAGES"], num_warps=tile["WARPS"],
    )  # fmt: skip
    return dz, kept, thin, dweights


@on_its_gpu
def product_of_experts(left, right, ends, order, each):
    rank, columns = left.shape[1], right.shape[1]
    tile = PRODUCT
    out = torch.empty(len(ends), rank, columns, device=left.device)
    _product_of_experts[(len(ends), triton.cdiv(columns, tile["BN"]))](
        left, right, ends, order, out, columns, left.stride(0), right.stride(0), rank, each,
        order is not None, tile["ROWS"], tile["BN"], tile["STAGES"], num_warps=tile["WARPS"],
    )  # fmt: skip
    return out
