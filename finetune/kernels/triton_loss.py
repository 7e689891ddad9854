"""Triton kernels of the cross-entropy of logits and of its gradient. They are only imported on a GPU.

`speed.chunked_cross_entropy.softmax_in_place` and `speed.fp8_cross_entropy.gradient_in_fp8` do the same in
plain torch, and the tests compare them.
"""

# Triton has no type stubs, and pyright takes its constexpr branches for ordinary branches
# pyright: reportPossiblyUnboundVariable=false, reportMissingImports=false
# pyright: reportIndexIssue=false, reportUnknownVariableType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from finetune.kernels.triton_linear import on_its_gpu

# Columns of a tile and warps. 3,328 rows of 151,936 logits take 1.06 ms on an H100, and Inductor's code for
# them 1.85 ms. 2,304 rows with an fp8 gradient take 0.67 ms on an H200 (0.95 ms with tiles of 16,384).
COLUMNS, WARPS = 16384, 16
FP8_COLUMNS, FP8_WARPS = 2048, 8


@triton.jit
def _reduced(logits, label, V, BN: tl.constexpr):
    """Highest logit, the sum of exp(logit - highest), the highest logit but the label's, and the best column.

    Each place of a tile is reduced on its own, and all places at the end, so that no tile waits.
    """
    cols = tl.arange(0, BN)
    highest, other = tl.full([BN], float("-inf"), tl.float32), tl.full([BN], float("-inf"), tl.float32)
    best = tl.zeros([BN], tl.int32) + V
    for start in range(0, V, BN):
        here = start + cols
        values = tl.load(logits + here, here < V, float("-inf")).to(tl.float32)
        best = tl.where(values > highest, here, best)
        highest = tl.maximum(highest, values)
        other = tl.where(here == label, other, tl.maximum(other, values))
    top = tl.max(highest, 0)
    total = tl.zeros([BN], tl.float32)
    for start in range(0, V, BN):
        here = start + cols
        values = tl.load(logits + here, here < V, float("-inf")).to(tl.float32)
        total += tl.exp(values - top)
    return top, tl.sum(total, 0), tl.max(other, 0), tl.min(tl.where(highest == top, best, V), 0)


@triton.jit
def _softmax_in_place(logits, labels, nll, right, V, DIFFERENTIATE: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    label = tl.load(labels + row)
    target = tl.maximum(label, 0)
    at_target = tl.load(logits + target).to(tl.float32)
    highest, total, best = float("-inf"), 0.0, 0
    for start in range(0, V, BN):
        cols = start + tl.arange(0, BN)
        values = tl.load(logits + cols, cols < V, float("-inf")).to(tl.float32)
        top = tl.max(values, 0)
        first = tl.min(tl.where(values == top, cols, V), 0)
        best = tl.where(top > highest, first, best)
        now = tl.maximum(highest, top)
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(values - now), 0)
        highest = now
    log_z = highest + tl.log(total)
    tl.store(nll + row, log_z - at_target)
    tl.store(right + row, best == label)
    if DIFFERENTIATE:
        for start in range(0, V, BN):
            cols = start + tl.arange(0, BN)
            values = tl.load(logits + cols, cols < V, 0.0).to(tl.float32)
            gradient = tl.exp(values - log_z) - tl.where(cols == target, 1.0, 0.0)
            tl.store(logits + cols, gradient.to(logits.dtype.element_ty), cols < V)


@triton.jit
def _gradient_in_fp8(logits, labels, codes, scale, nll, right, entropy, V, BN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    codes += row * V
    label = tl.load(labels + row)
    target = tl.maximum(label, 0)
    at_target = tl.load(logits + target).to(tl.float32)
    highest, total, other, best = _reduced(logits, target, V, BN)
    log_z = highest + tl.log(total)
    tl.store(nll + row, log_z - at_target)
    tl.store(right + row, best == label)
    step = tl.maximum(tl.exp(other - log_z), 1.0 - tl.exp(at_target - log_z)) / 448.0
    step = tl.maximum(step, 1.1754943508222875e-38)
    tl.store(scale + row, step)
    mean, inverse = tl.zeros([BN], tl.float32), 1.0 / step
    for start in range(0, V, BN):
        cols = start + tl.arange(0, BN)
        values = tl.load(logits + cols, cols < V, -1e30).to(tl.float32)
        p = tl.exp(values - log_z)
        mean += p * tl.maximum(values, -1e30)  # p of -inf is 0, and adds nothing
        gradient = p - tl.where(cols == target, 1.0, 0.0)
        tl.store(codes + cols, (gradient * inverse).to(tl.float8e4nv), cols < V)
    tl.store(entropy + row, log_z - tl.sum(mean, 0))


@on_its_gpu
def gradient_in_fp8(logits, labels):
    """Compute the same as `speed.fp8_cross_entropy.gradient_in_fp8`, which explains arguments and results."""
    rows, vocabulary = logits.shape
    nll, entropy = (torch.empty(rows, device=logits.device) for _ in range(2))
    right = torch.empty(rows, device=logits.device, dtype=torch.bool)
    codes = torch.empty(rows, vocabulary, device=logits.device, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, 1, device=logits.device)
    _gradient_in_fp8[(rows,)](
        logits, labels, codes, scale, nll, right, entropy, vocabulary, FP8_COLUMNS, num_warps=FP8_WARPS
    )
    return nll, right, entropy, codes, scale


@on_its_gpu
def softmax_in_place(logits, labels, differentiate):
    """Negative log-likelihood [n] in float32, and whether the label has the highest logit [n].

    `logits` [n, vocabulary] hold their gradient afterwards, if `differentiate`. Results of rows with label
    -100 have no meaning.
    """
    rows, vocabulary = logits.shape
    nll = torch.empty(rows, device=logits.device)
    right = torch.empty(rows, device=logits.device, dtype=torch.bool)
    _softmax_in_place[(rows,)](
        logits, labels, nll, right, vocabulary, differentiate, COLUMNS, num_warps=WARPS
    )
    return nll, right
