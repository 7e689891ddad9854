"""Triton kernels of a gated MLP's activation, forward and backward. They are only imported on a GPU.

`ops` has the same mathematics in plain torch, and the tests compare both. T is tokens, F the intermediate
size, R a rank padded to a power of two (16 or more).
"""

# Triton has no type stubs, and pyright takes its constexpr branches for ordinary branches
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from finetune.kernels.triton_linear import on_its_gpu

TILE = {"ROWS": 512, "BT": 16, "BN": 128, "STAGES": 3, "WARPS": 4}  # H200, F = 14336, R = 16
PLAIN_TILE = {**TILE, "ROWS": 128, "BT": 8}  # without adapters; H200, F = 28672
THIN_RANK = 32  # largest rank of adapters whose gradients are summed in the activation's kernel


@triton.jit
def _act(x, GELU: tl.constexpr):
    """Return value and derivative of SiLU, or of GELU's tanh form."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope
    sigmoid = tl.sigmoid(x)
    value = x * sigmoid
    return value, sigmoid + value * (1 - sigmoid)


@triton.jit
def _blocks(b, cols, here, F, R: tl.constexpr):
    """Return both blocks of the block-diagonal b [2 F, 2 R], transposed."""
    at = b + cols[:, None] * 2 * R + tl.arange(0, R)[None, :]
    gate, up = tl.load(at, here[:, None], 0.0), tl.load(at + F * 2 * R + R, here[:, None], 0.0)
    return tl.trans(gate), tl.trans(up)


@triton.jit
def _dot(a, b):
    """Multiply tiles. A float32 result is as exact as a float32 GEMM."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _products(t, rows, T, b_gate, b_up, R: tl.constexpr):
    """Return the adapters' additions to gate and up, and the inner activations."""
    at, ok = t + rows[:, None] * 2 * R + tl.arange(0, R)[None, :], (rows < T)[:, None]
    t_gate, t_up = tl.load(at, ok, 0.0), tl.load(at + R, ok, 0.0)
    return _dot(t_gate, b_gate), _dot(t_up, b_up), t_gate, t_up


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _compress(x, codes, scale, at, rows, block, count, T, ok):
    """Quantize a tile to int8 with one scale per row.

    Adding 1.5 * 2^23 to a float rounds it to an integer, faster than `floor` and a conversion.
    """
    step = tl.maximum(tl.reduce(tl.abs(x), 1, _larger) / 127, 1e-35, propagate_nan=tl.PropagateNan.ALL)
    step += step * 0  # Inf becomes NaN, because a NaN may be converted to any integer
    counted = x * (1 / step)[:, None] + 12582912.0
    tl.store(codes + at, counted.to(tl.int32, bitcast=True).to(tl.int8), ok)
    tl.store(scale + rows * count + block, step, rows < T)


@triton.jit
def _float(code):
    """Convert int8 to float32 in the same way."""
    return (code.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0


@triton.jit
def _gate_and_up(gu, scale, at, rows, T, F, ok, INT8: tl.constexpr):
    """Return the output of the base GEMM in float32, dequantized if INT8."""
    gate, up = tl.load(gu + at, ok, 0), tl.load(gu + at + F, ok, 0)
    if INT8:
        step = scale + rows * 2 * tl.num_programs(0) + tl.program_id(0)
        gate = _float(gate) * tl.load(step, rows < T, 0.0)[:, None]
        up = _float(up) * tl.load(step + tl.num_programs(0), rows < T, 0.0)[:, None]
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _activate(
    gu, t, b, column, h, amax, codes, scale, T, F, R: tl.constexpr, ADAPTED: tl.constexpr,
    COLUMN: tl.constexpr, AMAX: tl.constexpr, INT8: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    here = cols < F
    if ADAPTED:
        b_gate, b_up = _blocks(b, cols, here, F, R)
    if COLUMN:
        scale_gate, scale_up = tl.load(column + cols, here, 0.0), tl.load(column + F + cols, here, 0.0)
    for start in tl.range(0, ROWS, BT, num_stages=STAGES):
        rows = tl.program_id(1).to(tl.int64) * ROWS + start + tl.arange(0, BT)
        ok = (rows < T)[:, None] & here[None, :]
        at = rows[:, None] * 2 * F + cols[None, :]
        gate, up = _gate_and_up(gu, scale, at, rows, T, F, ok, False)
        if INT8:
            tiles = tl.num_programs(0)
            _compress(gate, codes, scale, at, rows, tl.program_id(0), 2 * tiles, T, ok)
            _compress(up, codes, scale, at + F, rows, tl.program_id(0) + tiles, 2 * tiles, T, ok)
        if ADAPTED:
            more_gate, more_up, _, _ = _products(t, rows, T, b_gate, b_up, R)
            gate, up = gate + more_gate, up + more_up
        if COLUMN:
            gate, up = gate * scale_gate[None, :], up * scale_up[None, :]
        value, _ = _act(gate, GELU)
        made = (value * up).to(h.dtype.element_ty)
        tl.store(h + rows[:, None] * F + cols[None, :], made, ok)
        if AMAX:
            tl.store(amax + tl.program_id(0) * T + rows, tl.max(tl.abs(made.to(tl.float32)), 1), rows < T)


@triton.jit
def _activate_backward(
    gu, scale, t, b, column, dh, dt_down, a_down, weight_scale, dgu, h, amax, dcolumn, db, da_down, T, F,
    INT8: tl.constexpr, R: tl.constexpr, ADAPTED: tl.constexpr, R_DOWN: tl.constexpr,
    ADAPTED_DOWN: tl.constexpr, COLUMN: tl.constexpr, AMAX: tl.constexpr, SUMS: tl.constexpr,
    GELU: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the backward pass. With SUMS, each program writes its part of the gradients of b and a_down."""
    cols = tl.program_id(0) * BN + tl.arange(0, BN)
    ranks, ranks_down, here = tl.arange(0, R), tl.arange(0, R_DOWN), cols < F
    if ADAPTED:
        b_gate, b_up = _blocks(b, cols, here, F, R)
    if ADAPTED_DOWN:
        right = tl.load(a_down + ranks_down[:, None] * F + cols[None, :], here[None, :], 0.0)
    if COLUMN:
        scale_gate, scale_up = tl.load(column + cols, here, 0.0), tl.load(column + F + cols, here, 0.0)
        sum_gate, sum_up = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    if AMAX:
        weight_gate = tl.load(weight_scale + cols, here, 0.0)
        weight_up = tl.load(weight_scale + F + cols, here, 0.0)
    if SUMS and ADAPTED:
        db_gate, db_up = tl.zeros([BN, R], tl.float32), tl.zeros([BN, R], tl.float32)
    if SUMS and ADAPTED_DOWN:
        da = tl.zeros([R_DOWN, BN], tl.float32)
    for start in tl.range(0, ROWS, BT, num_stages=STAGES):
        rows = tl.program_id(1).to(tl.int64) * ROWS + start + tl.arange(0, BT)
        ok = (rows < T)[:, None] & here[None, :]
        at, at_h = rows[:, None] * 2 * F + cols[None, :], rows[:, None] * F + cols[None, :]
        gate, up = _gate_and_up(gu, scale, at, rows, T, F, ok, INT8)
        grad = tl.load(dh + at_h, ok, 0.0).to(tl.float32)
        if ADAPTED:
            more_gate, more_up, t_gate, t_up = _products(t, rows, T, b_gate, b_up, R)
            gate, up = gate + more_gate, up + more_up
        if ADAPTED_DOWN:
            dt = tl.load(dt_down + rows[:, None] * R_DOWN + ranks_down[None, :], (rows < T)[:, None], 0.0)
            grad += _dot(dt, right)
        if COLUMN:
            plain_gate, plain_up = gate, up
            gate, up = gate * scale_gate[None, :], up * scale_up[None, :]
        value, slope = _act(gate, GELU)
        made = (value * up).to(dgu.dtype.element_ty)
        if ADAPTED_DOWN and SUMS:
            da += _dot(tl.trans(dt), made)
        elif ADAPTED_DOWN:
            tl.store(h + at_h, made, ok)
        dgate, dup = grad * up * slope, grad * value
        if COLUMN:
            sum_gate += tl.sum(dgate * plain_gate, 0)
            sum_up += tl.sum(dup * plain_up, 0)
            dgate, dup = dgate * scale_gate[None, :], dup * scale_up[None, :]
        dgate, dup = dgate.to(dgu.dtype.element_ty), dup.to(dgu.dtype.element_ty)
        tl.store(dgu + at, dgate, ok)
        tl.store(dgu + at + F, dup, ok)
        if SUMS and ADAPTED:
            db_gate += _dot(tl.trans(dgate), t_gate)
            db_up += _dot(tl.trans(dup), t_up)
        if AMAX:
            big = tl.abs(dgate.to(tl.float32) * weight_gate[None, :])
            big = tl.maximum(big, tl.abs(dup.to(tl.float32) * weight_up[None, :]))
            tl.store(amax + tl.program_id(0) * T + rows, tl.max(big, 1), rows < T)
    place = tl.program_id(1).to(tl.int64)
    if COLUMN:
        tl.store(dcolumn + place * 2 * F + cols, sum_gate, here)
        tl.store(dcolumn + place * 2 * F + F + cols, sum_up, here)
    if SUMS and ADAPTED:
        part = db + (place * 2 * F + cols)[:, None] * R + ranks[None, :]
        tl.store(part, db_gate, here[:, None])
        tl.store(part + F * R, db_up, here[:, None])
    if SUMS and ADAPTED_DOWN:
        part = da_down + (place * R_DOWN + ranks_down)[:, None] * F + cols[None, :]
        tl.store(part, da, here[None, :])


@on_its_gpu
def activate(gu, t, b, column, act, largest, rounded):
    """Return h, amax, codes and scale, empty if not requested. A tile is as wide as a block (`ops.BLOCK`)."""
    tokens, size = gu.shape[0], gu.shape[1] // 2
    tile = TILE if t is not None else PLAIN_TILE
    h = torch.empty(tokens, size, device=gu.device, dtype=gu.dtype)
    grid = (triton.cdiv(size, tile["BN"]), triton.cdiv(tokens, tile["ROWS"]))
    parts = torch.empty(grid[0], tokens, device=gu.device) if largest else None
    codes = torch.empty_like(gu, dtype=torch.int8) if rounded else None
    scale = torch.empty(tokens, 2 * grid[0], device=gu.device) if rounded else None
    rank = t.shape[1] // 2 if t is not None else 16
    _activate[grid](
        gu, t, b, column, h, parts, codes, scale, tokens, size, rank, t is not None, column is not None,
        largest, rounded, act == "gelu_tanh", tile["ROWS"], tile["BT"], tile["BN"], tile["STAGES"],
        num_warps=tile["WARPS"],
    )  # fmt: skip
    return h, parts.amax(0) if parts is not None else torch.empty(0, device=gu.device), codes, scale


@on_its_gpu
def activate_backward(gu, t, b, column, act, dh, dt_down, a_down, weight_scale, scale=None):
    """Return dgu, h (if not summed), amax, dcolumn, the two blocks of db and da_down (if summed here)."""
    tokens, size = dh.shape
    tile = TILE if t is not None or dt_down is not None else PLAIN_TILE
    grid = (triton.cdiv(size, tile["BN"]), triton.cdiv(tokens, tile["ROWS"]))
    dgu, h, db, da_down = torch.empty_like(gu, dtype=dh.dtype), None, None, None
    largest = torch.empty(grid[0], tokens, device=gu.device) if weight_scale is not None else None
    parts = torch.empty(grid[1], 2 * size, device=gu.device) if column is not None else None
    rank = t.shape[1] // 2 if t is not None else 16
    rank_down = dt_down.shape[1] if dt_down is not None else 16
    sums = max(rank, rank_down) <= THIN_RANK  # larger ranks do not fit into registers
    if sums and t is not None:
        db = torch.empty(grid[1], 2 * size, rank, device=gu.device)
    if dt_down is not None and sums:
        da_down = torch.empty(grid[1], rank_down, size, device=gu.device)
    elif dt_down is not None:
        h = torch.empty_like(dh)
    _activate_backward[grid](
        gu, scale, t, b, column, dh, dt_down, a_down, weight_scale, dgu, h, largest, parts, db, da_down,
        tokens, size, scale is not None, rank, t is not None, rank_down, dt_down is not None,
        column is not None, weight_scale is not None, sums, act == "gelu_tanh", tile["ROWS"], tile["BT"],
        tile["BN"], tile["STAGES"], num_warps=tile["WARPS"],
    )  # fmt: skip
    empty = torch.empty(0, device=gu.device)
    amax = largest.amax(0) if largest is not None else empty
    dcolumn = parts.sum(0) if parts is not None else empty.clone()
    db = None if db is None else db.sum(0).to(dh.dtype).chunk(2)
    return dgu, h, amax, dcolumn, db, None if da_down is None else da_down.sum(0).to(dh.dtype)
