"""Triton kernels for what torch and Inductor leave slow; only imported where there is a GPU.

The same mathematics in plain torch, against which they are tested, stands in `ops`.
T is tokens, N outputs, F the intermediate size, R a rank padded to a power of two (16 or more). A kernel that
reads many rows against the same columns walks down the rows with loads in flight (`tl.range(num_stages)`): a
program a tile ran at a third of the memory's speed.
"""

# Triton has no stubs here, and its constexpr branches look like ordinary ones:
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false, reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = {
    "ROWS": 512,
    "BT": 16,
    "BN": 128,
    "STAGES": 3,
    "WARPS": 4,
}  # of the activation; H200, F = 14336, R = 16
LONGEST_ROW = 32768  # that one program quantises
THIN_TILE = {"BT": 64, "BN": 128, "STAGES": 4, "WARPS": 4}  # of a product made while rounding
NORM_TILE = {"BT": 32, "BN": 128, "STAGES": 4, "WARPS": 4}
THIN = 64  # columns of a product that is made beside something else
THIN_RANK = 32  # of the adapters whose gradients are summed where the activation's are made


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
    total = tl.load(at, ok, 0.0).to(tl.float32) + tl.dot(left, tl.trans(right))
    tl.store(at, total.to(y.dtype.element_ty), ok)


@triton.jit
def _act(x, GELU: tl.constexpr):
    """Value and derivative of SiLU, or of GELU's tanh form."""
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
    """Both blocks of the block-diagonal b [2 F, 2 R], transposed."""
    at = b + cols[:, None] * 2 * R + tl.arange(0, R)[None, :]
    gate, up = tl.load(at, here[:, None], 0.0), tl.load(at + F * 2 * R + R, here[:, None], 0.0)
    return tl.trans(gate), tl.trans(up)


@triton.jit
def _products(t, rows, T, b_gate, b_up, R: tl.constexpr):
    """What the adapters add to gate and up, and their inner products."""
    at, ok = t + rows[:, None] * 2 * R + tl.arange(0, R)[None, :], (rows < T)[:, None]
    t_gate, t_up = tl.load(at, ok, 0.0), tl.load(at + R, ok, 0.0)
    return tl.dot(t_gate, b_gate), tl.dot(t_up, b_up), t_gate, t_up


@triton.jit
def _activate(
    gu, t, b, column, h, amax, T, F, R: tl.constexpr, ADAPTED: tl.constexpr, COLUMN: tl.constexpr,
    AMAX: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
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
        at = gu + rows[:, None] * 2 * F + cols[None, :]
        gate, up = tl.load(at, ok, 0.0).to(tl.float32), tl.load(at + F, ok, 0.0).to(tl.float32)
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
    gu, t, b, column, dh, dt_down, a_down, weight_scale, dgu, h, amax, dcolumn, db, da_down, T, F,
    R: tl.constexpr, ADAPTED: tl.constexpr, R_DOWN: tl.constexpr, ADAPTED_DOWN: tl.constexpr,
    COLUMN: tl.constexpr, AMAX: tl.constexpr, SUMS: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With SUMS each program writes what its rows add to the gradients of b and a_down; else h is written."""
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
        gate, up = tl.load(gu + at, ok, 0.0).to(tl.float32), tl.load(gu + at + F, ok, 0.0).to(tl.float32)
        grad = tl.load(dh + at_h, ok, 0.0).to(tl.float32)
        if ADAPTED:
            more_gate, more_up, t_gate, t_up = _products(t, rows, T, b_gate, b_up, R)
            gate, up = gate + more_gate, up + more_up
        if ADAPTED_DOWN:
            dt = tl.load(dt_down + rows[:, None] * R_DOWN + ranks_down[None, :], (rows < T)[:, None], 0.0)
            grad += tl.dot(dt, right)
        if COLUMN:
            plain_gate, plain_up = gate, up
            gate, up = gate * scale_gate[None, :], up * scale_up[None, :]
        value, slope = _act(gate, GELU)
        made = (value * up).to(dgu.dtype.element_ty)
        if ADAPTED_DOWN and SUMS:
            da += tl.dot(tl.trans(dt), made)
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
            db_gate += tl.dot(tl.trans(dgate), t_gate)
            db_up += tl.dot(tl.trans(dup), t_up)
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


@triton.jit
def _quantise(x, column, amax, codes, scale, N, SCALED: tl.constexpr, BN: tl.constexpr):
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
def _quantise_product(
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
        total += tl.dot(block, right)
        values = block.to(tl.float32)
        if SCALED:
            values *= tl.load(column + cols, here, 0.0)[None, :]
        tl.store(codes + at, (values / step[:, None]).to(tl.float8e4nv), ok)
    tl.store(scale + rows, step, rows < T)
    tl.store(
        product + rows[:, None] * R + ranks[None, :], total.to(product.dtype.element_ty), (rows < T)[:, None]
    )


@triton.jit
def _quantise_rows(x, column, codes, scale, N, SCALED: tl.constexpr, B: tl.constexpr):
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
        values += tl.dot(left, right, input_precision="tf32x3")  # as exact as float32's own
        total += values * values
    tl.store(norm + rows, tl.sqrt(tl.sum(total, 1)), rows < OUT)


@triton.jit
def _dequantise(
    packed, absmax, table, out, WORDS, IN_BLOCK: tl.constexpr, NESTED: tl.constexpr, B: tl.constexpr
):  # a word is 8 codes, so 16 bytes of bf16: what a thread stores at once
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
    code = (codes[:, None] >> ((place ^ 1) * 4)[None, :]) & 15  # of a byte, the high bits come first
    values = tl.load(table + code) * scale[:, None]
    at = out + start.to(tl.int64) * 8 + (tl.arange(0, B) * 8)[:, None] + place[None, :]
    tl.store(at, values.to(out.dtype.element_ty), here[:, None])


def add_product_(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    """One pass over y; cuBLAS's needs two."""
    tokens, size = y.shape
    grid = (triton.cdiv(size, 128), triton.cdiv(tokens, 64))
    _add_product[grid](y, t, b, tokens, size, t.shape[1], 64, 128, num_warps=4)


def activate(gu, t, b, column, act, largest):
    tokens, size = gu.shape[0], gu.shape[1] // 2
    h = torch.empty(tokens, size, device=gu.device, dtype=gu.dtype)
    grid = (triton.cdiv(size, TILE["BN"]), triton.cdiv(tokens, TILE["ROWS"]))
    parts = torch.empty(grid[0], tokens, device=gu.device) if largest else None
    rank = t.shape[1] // 2 if t is not None else 16
    _activate[grid](
        gu, t, b, column, h, parts, tokens, size, rank, t is not None, column is not None, largest,
        act == "gelu_tanh", TILE["ROWS"], TILE["BT"], TILE["BN"], TILE["STAGES"], num_warps=TILE["WARPS"],
    )  # fmt: skip
    return h, parts.amax(0) if parts is not None else torch.empty(0, device=gu.device)


def activate_backward(gu, t, b, column, act, dh, dt_down, a_down, weight_scale):
    """dgu, h (if not summed), amax, dcolumn, the two blocks of db and da_down (if summed on the way)."""
    tokens, size = dh.shape
    grid = (triton.cdiv(size, TILE["BN"]), triton.cdiv(tokens, TILE["ROWS"]))
    dgu, h, db, da_down = torch.empty_like(gu), None, None, None
    largest = torch.empty(grid[0], tokens, device=gu.device) if weight_scale is not None else None
    parts = torch.empty(grid[1], 2 * size, device=gu.device) if column is not None else None
    rank = t.shape[1] // 2 if t is not None else 16
    rank_down = dt_down.shape[1] if dt_down is not None else 16
    sums = max(rank, rank_down) <= THIN_RANK  # they would not fit into registers
    if sums and t is not None:
        db = torch.empty(grid[1], 2 * size, rank, device=gu.device)
    if dt_down is not None and sums:
        da_down = torch.empty(grid[1], rank_down, size, device=gu.device)
    elif dt_down is not None:
        h = torch.empty_like(dh)
    _activate_backward[grid](
        gu, t, b, column, dh, dt_down, a_down, weight_scale, dgu, h, largest, parts, db, da_down, tokens,
        size, rank, t is not None, rank_down, dt_down is not None, column is not None,
        weight_scale is not None, sums, act == "gelu_tanh", TILE["ROWS"], TILE["BT"], TILE["BN"],
        TILE["STAGES"], num_warps=TILE["WARPS"],
    )  # fmt: skip
    empty = torch.empty(0, device=gu.device)
    amax = largest.amax(0) if largest is not None else empty
    dcolumn = parts.sum(0) if parts is not None else empty.clone()
    db = None if db is None else db.sum(0).to(gu.dtype).chunk(2)
    return dgu, h, amax, dcolumn, db, None if da_down is None else da_down.sum(0).to(gu.dtype)


def quantise_product(x, column, amax, b):
    (rows, size), rank = x.shape, b.shape[1]
    codes = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=x.device)
    product = x.new_empty(rows, rank)
    grid = (triton.cdiv(rows, THIN_TILE["BT"]),)
    _quantise_product[grid](
        x, column, amax, b, codes, scale, product, rows, size, b.stride(0), b.stride(1), rank,
        column is not None, THIN_TILE["BT"], THIN_TILE["BN"], THIN_TILE["STAGES"],
        num_warps=THIN_TILE["WARPS"],
    )  # fmt: skip
    return codes, scale, product


def quantise_known(x, column, amax):
    codes = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(x.shape[0], 1, device=x.device)
    grid = (x.shape[0], triton.cdiv(x.shape[1], 4096))  # the second has no more than 65,535
    _quantise[grid](x, column, amax, codes, scale, x.shape[1], column is not None, 4096, num_warps=8)
    return codes, scale


def quantise_rows(x, column):
    rows, size = x.shape
    codes = torch.empty(rows, size, device=x.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=x.device)
    block = triton.next_power_of_2(size)
    warps = 4 if block <= 8192 else 8 if block <= 16384 else 16
    _quantise_rows[(rows,)](x, column, codes, scale, size, column is not None, block, num_warps=warps)
    return codes, scale


def transpose_bytes(source: torch.Tensor) -> torch.Tensor:
    """A contiguous [columns, rows] copy of `source` [rows, columns] uint8."""
    rows, columns = source.shape
    target = torch.empty(columns, rows, dtype=source.dtype, device=source.device)
    _transpose[(triton.cdiv(rows, 128), triton.cdiv(columns, 128))](
        source, target, rows, columns, 128, num_warps=8
    )
    return target


def dora_norm(weight, column, a, b, scaling):
    """||column W + scaling b a|| of each row [out], in one pass over W [out, in]; all else float32."""
    (size, inputs), rank = weight.shape, len(a)
    norm = torch.empty(size, device=weight.device)
    padded = max(16, triton.next_power_of_2(rank))
    _dora_norm[(triton.cdiv(size, NORM_TILE["BT"]),)](
        weight, column, a, b, scaling, norm, size, inputs, rank, column is not None, padded, NORM_TILE["BT"],
        NORM_TILE["BN"], NORM_TILE["STAGES"], num_warps=NORM_TILE["WARPS"],
    )  # fmt: skip
    return norm


def dequantise(groups, dtype):
    """All weights of `groups` (packed, absmax, table) in one tensor, at the memory's speed."""
    rows, columns = [len(packed) for packed, _, _ in groups], 2 * groups[0][0].shape[1]
    out = torch.empty(sum(rows), columns, dtype=dtype, device=groups[0][0].device)
    for (packed, absmax, table), part in zip(groups, out.split(rows), strict=True):
        words = packed.numel() // 4
        _dequantise[(triton.cdiv(words, 512),)](
            packed.view(-1).view(torch.int32), absmax, table, part, words, words // absmax.numel(),
            absmax.dtype == torch.uint8, 512, num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds a scale before the offset is added to it
        )  # fmt: skip
    return out
