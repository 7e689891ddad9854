"""PyTorch operators for rounding to fp8 and int8, a transpose, 4-bit weights, thin GEMMs and an activation.

Each operator is registered with torch, so that torch.compile does not trace into it. On a GPU it is a Triton
kernel (`triton_linear`, `triton_mlp`). On a CPU it is the same mathematics in plain torch, and the tests
compare the kernels with it. T is tokens, N outputs, F the intermediate size, R a rank padded to a power of
two (16 or more).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from finetune.kernels.registration import operator, shapes_of

triton_linear: Any = None
triton_mlp: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_linear, triton_mlp

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # largest e4m3 value
NESTED = 256  # number of scales of 4-bit blocks that share one scale
BLOCK = 128  # number of int8 values that share one scale
ACTIVATIONS = {  # class name in transformers or torch -> name in the kernels
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@operator("quantize_rows(Tensor x, Tensor? column=None, Tensor? amax=None) -> (Tensor, Tensor)")
def quantize_rows(
    x: torch.Tensor, column: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x * column to fp8, so that x * column ~ scale * codes.

    A row of zeros has quantized weights of zero. A row with NaN or Inf has NaN among its quantized weights,
    so every result computed from it is NaN.

    Args:
        x: [rows, columns], any float dtype.
        column: a factor for each column [columns] in float32, or `None`.
        amax: the largest magnitude of each row of x * column [rows] in float32, if it is known.

    Returns:
        codes: [rows, columns] e4m3.
        scale: [rows, 1] float32, the row's largest magnitude over 448.
    """
    if x.is_cuda and amax is not None:
        return triton_linear.quantize_known(x.contiguous(), column, amax)
    if x.is_cuda and x.shape[1] <= triton_linear.LONGEST_ROW:
        return triton_linear.quantize_rows(x.contiguous(), column)
    values = x.float() if column is None else x.float() * column
    largest = values.abs().amax(dim=-1, keepdim=True) if amax is None else amax[:, None]
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scale).to(E4M3), scale


@shapes_of("quantize_rows")
def _(x: torch.Tensor, column: object = None, amax: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return codes, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


@operator("quantize_product(Tensor x, Tensor? column, Tensor amax, Tensor b) -> (Tensor, Tensor, Tensor)")
def quantize_product(
    x: torch.Tensor, column: torch.Tensor | None, amax: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `quantize_rows` of x [rows, columns] and the thin GEMM x b with b [columns, R] in one kernel.

    Returns:
        codes: [rows, columns] e4m3.
        scale: [rows, 1] float32.
        product: [rows, R], computed from x without `column`.
    """
    if x.is_cuda and b.shape[1] <= triton_linear.THIN:
        return triton_linear.quantize_product(x.contiguous(), column, amax, b)
    return *quantize_rows(x, column, amax), x @ b


@shapes_of("quantize_product")
def _(
    x: torch.Tensor, column: object, amax: object, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return codes, scale, x.new_empty(x.shape[0], b.shape[1])


@operator("transpose(Tensor codes) -> Tensor")
def transpose(codes: torch.Tensor) -> torch.Tensor:
    """Return a contiguous [..., in, out] copy of fp8 weights [..., out, in], as an fp8 GEMM needs it."""
    if codes.is_cuda:  # 10 times faster than eager mode, and 2 times faster than Inductor
        return triton_linear.transpose_bytes(codes.contiguous().view(torch.uint8)).view(codes.dtype)
    return codes.mT.clone(memory_format=torch.contiguous_format)


@shapes_of("transpose")
def _(codes: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])


@operator("dequantize(Tensor[] stored, ScalarType dtype, Tensor? after=None) -> Tensor")
def dequantize(
    stored: list[torch.Tensor], dtype: torch.dtype, after: torch.Tensor | None = None
) -> torch.Tensor:
    """Dequantize and concatenate 4-bit weights in one kernel, with the result of `dequantize_4bit`.

    Args:
        stored: packed, absmax and table of each weight (`four_bit.stored`). All have the same input size.
        after: a tensor that must be computed before. The backward pass gives its gradient. Otherwise a
            compiler would save the weight of the forward pass for the backward pass.

    Returns:
        [sum of outputs, in] in `dtype`.
    """
    groups = list(zip(stored[::3], stored[1::3], stored[2::3], strict=True))
    if stored[0].is_cuda:
        return triton_linear.dequantize(groups, dtype)
    return torch.cat([_dequantize(*group, dtype) for group in groups])


@shapes_of("dequantize")
def _(stored: list[torch.Tensor], dtype: torch.dtype, after: object = None) -> torch.Tensor:
    rows = sum(packed.shape[0] for packed in stored[::3])
    return stored[0].new_empty(rows, 2 * stored[0].shape[1], dtype=dtype)


@operator("later(Tensor x, Tensor after) -> Tensor")
def later(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return a copy of x that can't be computed before `after`.

    The backward pass gives its gradient as `after`. Otherwise a compiler that sees the same GEMM in the
    forward and the backward pass would save its result.
    """
    return x.clone()


@shapes_of("later")
def _(x: torch.Tensor, after: object) -> torch.Tensor:
    return torch.empty_like(x)


def _dequantize(
    packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    scale = absmax.float()
    if absmax.dtype == torch.uint8:
        outer = table[273:].repeat_interleave(NESTED)[: absmax.numel()]
        scale = table[16:272][absmax.int()] * outer + table[272]
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).int()
    values = table[codes].view(absmax.numel(), -1) * scale[:, None]
    return values.to(dtype).view(len(packed), -1)


@operator("add_product(Tensor(a!) y, Tensor t, Tensor b) -> ()")
def add_product_(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    """Compute y [T, N] += t [T, R] b [N, R]^T in place."""
    torch.autograd.graph.increment_version(y)
    if y.is_cuda:
        triton_linear.add_product_(y, t, b)
    else:
        y.add_(t @ b.t())


@shapes_of("add_product")
def _(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    return None


@operator(
    "activate(Tensor gu, Tensor? t, Tensor? b, Tensor? column, str act, bool largest, bool "
    "rounded=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
def activate(
    gu: torch.Tensor,
    t: torch.Tensor | None,
    b: torch.Tensor | None,
    column: torch.Tensor | None,
    act: str,
    largest: bool,
    rounded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute h = act(gate) up, with (gate, up) = column (gu + t b^T).

    Args:
        gu: the output of the base GEMM [T, 2 F]: gate, then up.
        t: the inner activations of the adapters [T, 2 R], or `None`.
        b: the block-diagonal outer matrix of the adapters [2 F, 2 R].
        column: a factor for each output [2 F] in fp32, or `None`.
        act: `silu` or `gelu_tanh`.
        largest: whether to return the largest |h| of each row, which rounding h to fp8 needs.
        rounded: whether to return gu in int8 for the backward pass.

    Returns:
        h [T, F]; the largest |h| of each row [T] in float32; `compress` of gu. Tensors that were not
        requested are empty.
    """
    within = gu.shape[1] // 2 % BLOCK == 0  # then each tile of a kernel is a block
    codes, scale = gu.new_empty(0, dtype=torch.int8), gu.new_empty(0, dtype=torch.float32)
    if rounded and not (gu.is_cuda and within):
        codes, scale = compress(gu)
    if gu.is_cuda:
        h, amax, *made = triton_mlp.activate(gu, t, b, column, act, largest, rounded and within)
        return (h, amax, *made) if rounded and within else (h, amax, codes, scale)
    gate, up = _gate_and_up(gu, t, b, column)
    h = (act_of(gate, act)[0] * up).to(gu.dtype)
    amax = h.float().abs().amax(1) if largest else gu.new_empty(0, dtype=torch.float32)
    return h, amax, codes, scale


@shapes_of("activate")
def _(
    gu: torch.Tensor, t: object, b: object, column: object, act: str, largest: bool, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    amax = gu.new_empty(gu.shape[0] if largest else 0, dtype=torch.float32)
    codes = gu.new_empty(gu.shape if rounded else 0, dtype=torch.int8)
    blocks = (len(gu), gu.shape[1] // math.gcd(gu.shape[1] // 2, BLOCK)) if rounded else 0
    scale = gu.new_empty(blocks, dtype=torch.float32)
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2), amax, codes, scale


def compress(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, N] to int8 for the backward pass, which halves its memory.

    Each value changes by at most 1/254 of the largest value in its block of 128 (activation compression:
    ActNN, arXiv 2104.14129).

    Returns:
        codes: [T, N] int8.
        scale: [T, N / 128] float32. A block with NaN or Inf becomes NaN. If 128 does not divide N / 2, the
            block size is the largest power of two that does.
    """
    values = x.float().view(len(x), -1, math.gcd(x.shape[1] // 2, BLOCK))
    scale = (values.abs().amax(-1) / 127).clamp(min=1e-35)
    scale = scale + scale * 0  # Inf becomes NaN
    codes = (values / scale[..., None]).round()
    return codes.nan_to_num().to(torch.int8).view(x.shape), scale


def expand(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor [T, N] that `compress` has quantized, in `dtype`."""
    return (codes.float().view(*scale.shape, -1) * scale[..., None]).to(dtype).view(codes.shape)


@operator(
    "activate_backward(Tensor gu, Tensor? t, Tensor? b, Tensor? column, str act, Tensor dh, Tensor? "
    "dt_down, Tensor? a_down, Tensor? weight_scale, Tensor? scale=None) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor)"
)
def activate_backward(
    gu: torch.Tensor,
    t: torch.Tensor | None,
    b: torch.Tensor | None,
    column: torch.Tensor | None,
    act: str,
    dh: torch.Tensor,
    dt_down: torch.Tensor | None,
    a_down: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the backward pass of `activate` for the gradient dh + dt_down a_down of h, and recompute h.

    Args:
        dh: the gradient through the frozen weight [T, F].
        dt_down: the gradient of the next adapter's inner activations [T, R], or `None`.
        a_down: the inner matrix of the next adapter [R, F].
        weight_scale: the scale of the fp8 weight of gate and up [2 F], or `None`.
        scale: the scale of `compress` if gu is the int8 output of the base GEMM; else `None`.

    Returns:
        dgu [T, 2 F]; the largest |dgu weight_scale| of each row [T] (empty without `weight_scale`); the
        gradients of `column` [2 F], of b [2 F, 2 R] (zero outside of the blocks) and of a_down [R, F], each
        empty without its tensor.
    """
    if scale is not None and not (gu.is_cuda and dh.shape[1] % BLOCK == 0):
        gu, scale = expand(gu, scale, dh.dtype), None
    if gu.is_cuda:
        made = triton_mlp.activate_backward(gu, t, b, column, act, dh, dt_down, a_down, weight_scale, scale)
    else:
        made = _activate_backward(gu, t, b, column, act, dh, dt_down, a_down, weight_scale)
    dgu, h, amax, dcolumn, db, da_down = made
    if t is not None and db is None:
        full, (rows, rank) = dgu.t() @ t, (dgu.shape[1] // 2, t.shape[1] // 2)
        db = full[:rows, :rank], full[rows:, rank:]
    if dt_down is not None and da_down is None:
        da_down = dt_down.t() @ h
    return (
        dgu,
        amax,
        dcolumn,
        dh.new_empty(0) if db is None else torch.block_diag(*db),
        dh.new_empty(0) if da_down is None else da_down,
    )


def _activate_backward(
    gu: torch.Tensor,
    t: torch.Tensor | None,
    b: torch.Tensor | None,
    column: torch.Tensor | None,
    act: str,
    dh: torch.Tensor,
    dt_down: torch.Tensor | None,
    a_down: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
) -> tuple[Any, ...]:
    """Return dgu, h, amax, dcolumn and the adapters' gradients, or `None` if not summed here."""
    plain = torch.cat(_gate_and_up(gu, t, b, None), dim=1)
    gate, up = _gate_and_up(gu, t, b, column)
    grad = dh.to(gate.dtype)
    if dt_down is not None and a_down is not None:
        grad = grad + dt_down.to(gate.dtype) @ a_down.to(gate.dtype)
    value, slope = act_of(gate, act)
    both = torch.cat([grad * up * slope, grad * value], dim=1)
    dcolumn = (both * plain).sum(0) if column is not None else both.new_empty(0)
    dgu = (both if column is None else both * column).to(gu.dtype)
    amax = (
        (dgu.float() * weight_scale).abs().amax(1)
        if weight_scale is not None
        else dgu.new_empty(0, dtype=torch.float32)
    )
    return dgu, (value * up).to(gu.dtype), amax, dcolumn, None, None


@shapes_of("activate_backward")
def _(
    gu: torch.Tensor,
    t: object,
    b: torch.Tensor | None,
    column: object,
    act: str,
    dh: torch.Tensor,
    dt_down: object,
    a_down: torch.Tensor | None,
    weight_scale: object,
    scale: object = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    exact = dh.dtype if dh.dtype == torch.float64 else torch.float32
    amax = gu.new_empty(gu.shape[0] if weight_scale is not None else 0, dtype=torch.float32)
    dcolumn = dh.new_empty(gu.shape[1] if column is not None else 0, dtype=exact)
    db = dh.new_empty(0 if b is None else b.shape)
    da_down = dh.new_empty(0 if a_down is None else a_down.shape)
    return torch.empty_like(gu, dtype=dh.dtype), amax, dcolumn, db, da_down


def _gate_and_up(
    gu: torch.Tensor, t: torch.Tensor | None, b: torch.Tensor | None, column: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    both = gu if gu.dtype == torch.float64 else gu.float()
    if t is not None and b is not None:
        both = both + t.to(both.dtype) @ b.to(both.dtype).t()
    if column is not None:
        both = both * column
    gate, up = both.chunk(2, dim=1)
    return gate, up


def act_of(x: torch.Tensor, act: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return value and derivative of SiLU, or of GELU's tanh form (arXiv 1606.08415)."""
    if act == "gelu_tanh":
        root = math.sqrt(2 / math.pi)
        tanh = torch.tanh(root * (x + 0.044715 * x**3))
        value = 0.5 * x * (1 + tanh)
        return value, 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * root * (1 + 3 * 0.044715 * x**2)
    sigmoid = torch.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
