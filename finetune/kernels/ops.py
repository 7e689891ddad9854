"""The operators that speed needs: rounding to fp8 and int8, a transpose, 4-bit weights, a thin product, an
activation.

Each is registered with torch, so that torch.compile takes it as it is: on a GPU a Triton kernel
(`triton_linear`, `triton_mlp`), elsewhere the same mathematics in plain torch, which the kernels are tested
against. T is tokens, N outputs, F the intermediate size, R a rank padded to a power of two (16 or more).
"""

from __future__ import annotations

import math
from typing import Any

import torch

triton_linear: Any = None
triton_mlp: Any = None
if torch.cuda.is_available():
    from finetune.kernels import triton_linear, triton_mlp

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
NESTED = 256  # scales of 4-bit blocks that share a scale of their own
BLOCK = 128  # numbers rounded to int8 that share a scale
ACTIVATIONS = {  # transformers' and torch's classes, by the names that kernels have for them
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


@torch.library.custom_op(
    "finetune::quantise_rows",
    mutates_args=(),
    schema="(Tensor x, Tensor? column=None, Tensor? amax=None) -> (Tensor, Tensor)",
)
def quantise_rows(
    x: torch.Tensor, column: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales with x * column ~ scale * codes.

    A row of zeros has codes of zero; a row that holds NaN or infinity has NaN among its codes, and so in all
    that is computed from it.

    Args:
        x: [rows, columns], any float dtype.
        column: a factor for each column [columns] in float32, or `None`.
        amax: the largest magnitude of each row of x * column [rows] in float32, where it is known.

    Returns:
        codes: [rows, columns] e4m3.
        scale: [rows, 1] float32, the row's largest magnitude over 448.
    """
    if x.is_cuda and amax is not None:
        return triton_linear.quantise_known(x.contiguous(), column, amax)
    if x.is_cuda and x.shape[1] <= triton_linear.LONGEST_ROW:
        return triton_linear.quantise_rows(x.contiguous(), column)
    values = x.float() if column is None else x.float() * column
    largest = values.abs().amax(dim=-1, keepdim=True) if amax is None else amax[:, None]
    scale = (largest / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (values / scale).to(E4M3), scale


@quantise_rows.register_fake
def _(x: torch.Tensor, column: object = None, amax: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    return codes, torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)


@torch.library.custom_op(
    "finetune::quantise_product",
    mutates_args=(),
    schema="(Tensor x, Tensor? column, Tensor amax, Tensor b) -> (Tensor, Tensor, Tensor)",
)
def quantise_product(
    x: torch.Tensor, column: torch.Tensor | None, amax: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantise_rows` of x [rows, columns], and the thin product x b of b [columns, R], in one pass over x.

    Returns:
        codes: [rows, columns] e4m3.
        scale: [rows, 1] float32.
        product: [rows, R], of x without `column`.
    """
    if x.is_cuda and b.shape[1] <= triton_linear.THIN:
        return triton_linear.quantise_product(x.contiguous(), column, amax, b)
    return *quantise_rows(x, column, amax), x @ b


@quantise_product.register_fake
def _(
    x: torch.Tensor, column: object, amax: object, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    return codes, scale, x.new_empty(x.shape[0], b.shape[1])


@torch.library.custom_op("finetune::transpose", mutates_args=(), schema="(Tensor codes) -> Tensor")
def transpose(codes: torch.Tensor) -> torch.Tensor:
    """A contiguous [in, out] copy of codes [out, in]: an fp8 GEMM wants its second operand column-major."""
    if codes.is_cuda:  # eager's own is ten times slower, Inductor's two
        return triton_linear.transpose_bytes(codes.contiguous().view(torch.uint8)).view(codes.dtype)
    return codes.t().clone(memory_format=torch.contiguous_format)


@transpose.register_fake
def _(codes: torch.Tensor) -> torch.Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0])


@torch.library.custom_op(
    "finetune::dequantise",
    mutates_args=(),
    schema="(Tensor[] stored, ScalarType dtype, Tensor? after=None) -> Tensor",
)
def dequantise(
    stored: list[torch.Tensor], dtype: torch.dtype, after: torch.Tensor | None = None
) -> torch.Tensor:
    """4-bit weights behind each other, in one pass and equal to bitsandbytes' `dequantize_4bit`.

    Args:
        stored: packed, absmax and table of each (`four_bit.stored`); all have the same inputs.
        after: a tensor that must be there before. Backward gives its gradient: else a compiler, seeing
            that forward has made the same, would keep that for backward.

    Returns:
        [sum of outputs, in] in `dtype`.
    """
    groups = list(zip(stored[::3], stored[1::3], stored[2::3], strict=True))
    if stored[0].is_cuda:
        return triton_linear.dequantise(groups, dtype)
    return torch.cat([_dequantise(*group, dtype) for group in groups])


@dequantise.register_fake
def _(stored: list[torch.Tensor], dtype: torch.dtype, after: object = None) -> torch.Tensor:
    rows = sum(packed.shape[0] for packed in stored[::3])
    return stored[0].new_empty(rows, 2 * stored[0].shape[1], dtype=dtype)


@torch.library.custom_op("finetune::later", mutates_args=(), schema="(Tensor x, Tensor after) -> Tensor")
def later(x: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """A copy of x that is there no earlier than `after`, in backward its gradient; nor is what is computed of
    it. A compiler that sees the same product in forward and backward would keep that instead."""
    return x.clone()


@later.register_fake
def _(x: torch.Tensor, after: object) -> torch.Tensor:
    return torch.empty_like(x)


def _dequantise(
    packed: torch.Tensor, absmax: torch.Tensor, table: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    scale = absmax.float()
    if absmax.dtype == torch.uint8:
        outer = table[273:].repeat_interleave(NESTED)[: absmax.numel()]
        scale = table[16:272][absmax.int()] * outer + table[272]
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).int()
    values = table[codes].view(absmax.numel(), -1) * scale[:, None]
    return values.to(dtype).view(len(packed), -1)


@torch.library.custom_op(
    "finetune::add_product", mutates_args=("y",), schema="(Tensor(a!) y, Tensor t, Tensor b) -> ()"
)
def add_product_(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    """y [T, N] += t [T, R] b [N, R]^T in place."""
    if y.is_cuda:
        triton_linear.add_product_(y, t, b)
    else:
        y.add_(t @ b.t())


@add_product_.register_fake
def _(y: torch.Tensor, t: torch.Tensor, b: torch.Tensor) -> None:
    return None


@torch.library.custom_op(
    "finetune::activate",
    mutates_args=(),
    schema="(Tensor gu, Tensor? t, Tensor? b, Tensor? column, str act, bool largest, bool rounded=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
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
    """h = act(gate) up, of (gate, up) = column (gu + t b^T).

    Args:
        gu: the base's product [T, 2 F]: gate, then up.
        t: the adapters' inner product [T, 2 R], or `None`.
        b: their block-diagonal outer matrix [2 F, 2 R].
        column: a factor for each output [2 F] in fp32, or `None`.
        act: `silu` or `gelu_tanh`.
        largest: whether each row's largest |h| is wanted, to round h to fp8.
        rounded: whether gu is wanted in int8, for backward.

    Returns:
        h [T, F]; the largest |h| of each row [T] in float32; `compress` of gu. What is not wanted is empty.
    """
    within = gu.shape[1] // 2 % BLOCK == 0  # a kernel's tiles are blocks then
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


@activate.register_fake
def _(
    gu: torch.Tensor, t: object, b: object, column: object, act: str, largest: bool, rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    amax = gu.new_empty(gu.shape[0] if largest else 0, dtype=torch.float32)
    codes = gu.new_empty(gu.shape if rounded else 0, dtype=torch.int8)
    blocks = (len(gu), gu.shape[1] // math.gcd(gu.shape[1] // 2, BLOCK)) if rounded else 0
    scale = gu.new_empty(blocks, dtype=torch.float32)
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2), amax, codes, scale


def compress(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N] in int8, for backward: half of its memory, each number off by at most 1/254 of the largest in
    its block of 128 (activation compression: ActNN, arXiv 2104.14129).

    Returns:
        codes: [T, N] int8.
        scale: [T, N / 128] float32; a block that holds NaN or infinity comes back as NaN. (Where 128 does not
            divide N / 2, blocks are of the largest power of two that does.)
    """
    values = x.float().view(len(x), -1, math.gcd(x.shape[1] // 2, BLOCK))
    scale = (values.abs().amax(-1) / 127).clamp(min=1e-35)
    scale = scale + scale * 0  # NaN where it is infinite
    codes = (values / scale[..., None]).round()
    return codes.nan_to_num().to(torch.int8).view(x.shape), scale


def expand(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `compress` has kept, [T, N] in `dtype`."""
    return (codes.float().view(*scale.shape, -1) * scale[..., None]).to(dtype).view(codes.shape)


@torch.library.custom_op(
    "finetune::activate_backward",
    mutates_args=(),
    schema="(Tensor gu, Tensor? t, Tensor? b, Tensor? column, str act, Tensor dh, Tensor? dt_down, "
    "Tensor? a_down, Tensor? weight_scale, Tensor? scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    """What `activate` gives back for the gradient dh + dt_down a_down of h; h itself is made again inside.

    Args:
        dh: the gradient through the frozen weight [T, F].
        dt_down: that of the next adapter's inner product [T, R], or `None`; `a_down` is its matrix [R, F].
        weight_scale: of the fp8 weight that made gu [2 F], or `None`.
        scale: with it, gu is what `compress` has made of the base's product; or `None`.

    Returns:
        dgu [T, 2 F]; the largest |dgu weight_scale| of each row [T] (empty without `weight_scale`); the
        gradients of `column` [2 F], of b [2 F, 2 R] (where b is not block-diagonal, zero) and of a_down
        [R, F], each empty without it.
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
    gu: Any, t: Any, b: Any, column: Any, act: str, dh: Any, dt_down: Any, a_down: Any, weight_scale: Any
) -> tuple[Any, ...]:
    """dgu, h, amax, dcolumn, and where they are not summed on the way, `None` for the adapters' gradients."""
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


@activate_backward.register_fake
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
    """Value and derivative of SiLU, or of GELU's tanh form (arXiv 1606.08415)."""
    if act == "gelu_tanh":
        root = math.sqrt(2 / math.pi)
        tanh = torch.tanh(root * (x + 0.044715 * x**3))
        value = 0.5 * x * (1 + tanh)
        return value, 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * root * (1 + 3 * 0.044715 * x**2)
    sigmoid = torch.sigmoid(x)
    return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
