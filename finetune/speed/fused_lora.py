"""Adapters on frozen layers at the cost of their GEMMs: LoRA, DoRA, AdaLoRA and IA3 as one formula.

    y = column * (x W^T + (x a^T) b^T)

Layers that read the same input (q, k and v; gate and up) are one product with the base and one with the
adapters, whose b stand block-diagonally in one matrix. The scaling is folded into a, the addition into one
pass over y, the activation between an MLP's two GEMMs is one kernel with its adapters' products inside, and
what it makes is made again in backward, not kept. Nothing has a gradient but x, a, b and column: W is frozen.

W is held in one of three ways, a tuple of tensors each: `(weight,)`; `(codes, scale)` in fp8; or packed,
absmax and table of each layer in 4 bits: its weight is made once in forward, once in backward, and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from peft.tuners.adalora import AdaLoraLayer
from peft.tuners.ia3 import IA3Layer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune.kernels import ops
from finetune.quantization import four_bit, fp8_linear
from finetune.speed import dora_norm

if TYPE_CHECKING:
    from torch import Tensor

Stored = Sequence[torch.Tensor]  # a frozen weight as it is held


class Factors(NamedTuple):
    """An adapter in the formula's terms; what it has not is `None`."""

    a: torch.Tensor | None = None  # [r, in], the scaling in it
    b: torch.Tensor | None = None  # [out, r]
    column: torch.Tensor | None = None  # [out]
    entry: torch.Tensor | None = None  # [in]: a factor of x, of IA3's feedforward layers


def factors(layer: nn.Module) -> Factors:
    """The adapter of a layer, made from PEFT's own parameters, so that they get the gradients."""
    if not isinstance(layer, BaseTunerLayer):
        return Factors()
    name = layer.active_adapters[0]
    if isinstance(layer, IA3Layer):
        vector = layer.ia3_l[name].flatten()
        return Factors(entry=vector) if layer.is_feedforward else Factors(column=vector)
    if isinstance(layer, AdaLoraLayer):
        scale = layer.scaling[name] / (layer.ranknum[name] + 1e-5)
        return Factors(layer.lora_A[name] * layer.lora_E[name] * scale, layer.lora_B[name])
    lora: Any = layer
    a, b = lora.lora_A[name].weight, lora.lora_B[name].weight
    return Factors(a * lora.scaling[name], b, dora_norm.column(lora, name))


def base_of(layer: nn.Module) -> Any:
    """The frozen layer under an adapter, or the layer itself."""
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


class Stack:
    """Layers that read the same input, run as one.

    Attributes:
        stored: the base weights [sum of outputs, in] as they are held; each layer's own tensors are views of
            these, or these of them: nothing is held twice.
        bias: [sum of outputs], or `None`.
    """

    def __init__(self, layers: list[Any], adapted: list[Any] | None = None) -> None:
        """
        Args:
            adapted: layers that say whether the adapter is on, where none of `layers` has one.
        """
        bases = [base_of(layer) for layer in layers]
        own: list[Any] = [layer for layer in layers if isinstance(layer, BaseTunerLayer)]
        self.adapted = own or adapted or []
        self.adapters = [layer.active_adapters for layer in self.adapted]
        self.layers, self.sizes = layers, [base.out_features for base in bases]
        self.stored, self.places = held(bases), _places(bases)
        self.bias = None if bases[0].bias is None else torch.cat([base.bias.detach() for base in bases])
        self.x: torch.Tensor | None = None  # the input that the outputs in `ready` are of
        self.ready: dict[int, torch.Tensor] = {}
        self.tracked = True  # whether with gradient
        self.kept = "product"  # of gate and up, until backward: that, in `int8`, or their `input`

    def active(self) -> bool:
        """Whether the layers are as they were fused: in training, that adapter on, not merged."""
        return self.layers[0].training and all(
            layer.active_adapters == names and not layer.disable_adapters and not layer.merged
            for layer, names in zip(self.adapted, self.adapters, strict=True)
        )

    def follow(self) -> bool:
        """Take the base's weights anew where they are others (PEFT puts new ones in place, merging an adapter
        or taking it out again); whether they were."""
        bases = [base_of(layer) for layer in self.layers]
        if _places(bases) == self.places:
            return False
        self.stored = held(bases)
        self.places = _places(bases)
        return True


def _places(bases: list[Any]) -> list[int]:
    return [base.weight.data_ptr() for base in bases]


def held(bases: list[Any]) -> Stored:
    """The frozen weights of layers as they are stored."""
    if four_bit.is_four_bit(bases[0]):
        return tuple(tensor for base in bases for tensor in four_bit.stored(base))
    weight = behind_each_other([base.weight for base in bases])
    if isinstance(bases[0], fp8_linear.Fp8Linear):
        return weight, behind_each_other([base.weight_scale for base in bases])
    return (weight,)


def behind_each_other(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows, of which each of `tensors` becomes a view."""
    if len(tensors) == 1:
        return tensors[0].detach()
    whole, start = torch.cat([tensor.detach() for tensor in tensors]), 0
    for tensor in tensors:
        tensor.data = whole[start : start + len(tensor)]
        start += len(tensor)
    return whole


def project(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """What all layers of a stack make of x [..., in]: [..., sum of outputs]."""
    flat = rows_of(x)
    found = [factors(layer) for layer in stack.layers]
    if found[0].entry is not None:  # such a layer stands alone
        flat = (flat * found[0].entry).to(flat.dtype)
    t, b = inner(flat, stack.layers, found), outer(flat, stack.sizes, found)
    y = _Linear.apply(flat, t, b, stack.stored)
    column = columns(stack.sizes, found, flat)
    y = y if column is None else (y * column).to(y.dtype)
    y = y if stack.bias is None else y + stack.bias.to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def gated_mlp(both: Stack, down: Stack, act: str, x: torch.Tensor) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) for x [..., hidden]; `both` is gate and up, or one layer that is both."""
    flat = rows_of(x)
    found = [factors(layer) for layer in both.layers]
    halves = found if len(found) == 2 else split(found[0])
    size = sum(both.sizes) // 2
    t = inner(flat, both.layers, found, even=True)
    if t is not None and len(found) == 1:  # one adapter of both halves: one product, and one mask of dropout
        t = torch.cat([t, t], dim=1)
    b = outer(flat, [size, size], halves, even=True)
    column, last = columns([size, size], halves, flat), factors(down.layers[0])
    if last.entry is not None:  # a factor of act(gate) * up is one of up
        plain = torch.ones(2 * size, device=flat.device) if column is None else column
        column = plain * torch.cat([torch.ones_like(last.entry), last.entry])
    a_down, b_down = last.a, outer(flat, down.sizes, [last])
    if a_down is not None and b_down is not None:
        a_down = nn.functional.pad(a_down.to(flat.dtype), (0, 0, 0, b_down.shape[1] - len(a_down)))
    y = _GatedMlp.apply(flat, t, b, column, a_down, b_down, both.stored, down.stored, act, both.kept)
    y = y if last.column is None else (y * last.column).to(y.dtype)
    return y.view(x.shape)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., in] as [T, in], in autocast's dtype where it is on: a norm that trains gives float32."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.reshape(-1, x.shape[-1]).to(dtype)


def split(both: Factors) -> list[Factors]:
    """The adapter of a layer that is gate and up, as two that share their a."""
    columns = (None, None) if both.column is None else both.column.chunk(2)
    rows = (None, None) if both.b is None else both.b.chunk(2)
    return [Factors(both.a, b, column) for b, column in zip(rows, columns, strict=True)]


def inner(
    x: torch.Tensor, layers: list[Any], found: list[Factors], *, even: bool = False
) -> torch.Tensor | None:
    """x [T, in] times the layers' stacked a: [T, padded ranks]; `None` without any.

    Args:
        even: every layer has the same share of the columns.
    """
    size = padded(found, even)
    if size == 0:
        return None
    share, rows, dropouts = size // len(found), [], []
    for layer, factor in zip(layers, found, strict=True):
        rank = 0 if factor.a is None else len(factor.a)
        a = x.new_zeros(0, x.shape[1]) if factor.a is None else factor.a.to(x.dtype)
        rows.append(nn.functional.pad(a, (0, 0, 0, share - rank)) if even else a)
        dropouts.append(layer.lora_dropout[layer.active_adapters[0]] if rank else nn.Identity())
    if any(isinstance(dropout, nn.Dropout) for dropout in dropouts):  # each layer has a mask of its own
        t = torch.cat([dropout(x) @ a.t() for dropout, a in zip(dropouts, rows, strict=True)], dim=1)
        return nn.functional.pad(t, (0, size - t.shape[1]))
    a = torch.cat(rows)
    return x @ nn.functional.pad(a, (0, 0, 0, size - len(a))).t()


def outer(
    x: torch.Tensor, sizes: list[int], found: list[Factors], *, even: bool = False
) -> torch.Tensor | None:
    """The layers' b as one block-diagonal matrix [sum of sizes, padded ranks]; `None` without any."""
    size = padded(found, even)
    if size == 0:
        return None
    start, rows = 0, []
    for index, (out, factor) in enumerate(zip(sizes, found, strict=True)):
        start = index * (size // len(found)) if even else start
        b = x.new_zeros(out, 0) if factor.b is None else factor.b.to(x.dtype)
        rows.append(nn.functional.pad(b, (start, size - start - b.shape[1])))
        start += b.shape[1]
    return torch.cat(rows)


def padded(found: list[Factors], even: bool) -> int:
    """Columns of the inner product: a power of two, 16 at least, as a kernel's product takes it; or none."""
    ranks = [0 if factor.b is None else factor.b.shape[1] for factor in found]
    if not any(ranks):
        return 0
    if even:
        return len(found) * max(16, 1 << (max(ranks) - 1).bit_length())
    return max(16, 1 << (sum(ranks) - 1).bit_length())


def columns(sizes: list[int], found: list[Factors], like: torch.Tensor) -> torch.Tensor | None:
    """The layers' columns as one [sum of sizes]; `None` without any."""
    if all(factor.column is None for factor in found):
        return None
    ones = [torch.ones(size, device=like.device) for size in sizes]
    return torch.cat([one if f.column is None else f.column for one, f in zip(ones, found, strict=True)])


def product(x: torch.Tensor, stored: Stored) -> torch.Tensor:
    """x [T, in] W^T of a frozen weight [out, in] as it is held, in fp8 if it is stored so."""
    if len(stored) == 2:
        codes, step = ops.quantise_rows(x)
        return fp8_linear.product(codes, step, stored[0], stored[1], x.dtype)
    weight = stored[0].to(x.dtype) if len(stored) == 1 else ops.dequantise(list(stored), x.dtype)
    return x @ weight.t()


def input_gradient(grad: torch.Tensor, stored: Stored) -> torch.Tensor:
    """The gradient of x in `product`."""
    if len(stored) == 2:
        return fp8_linear.input_gradient(grad, stored[0], stored[1])
    if len(stored) == 1:
        return grad @ stored[0].to(grad.dtype)
    return grad @ ops.dequantise(list(stored), grad.dtype, grad)


class _Linear(torch.autograd.Function):
    """y = x W^T + t b^T; t and b may be `None`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, b: Tensor, stored: Stored) -> torch.Tensor:
        y = product(x, stored)
        if t is not None:
            ops.add_product_(y, t, b)
        ctx.save_for_backward(t, b, *stored)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        t, b, *stored = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = input_gradient(grad, stored) if ctx.needs_input_grad[0] else None
        dt, db = (None, None) if t is None else (grad @ b, grad.t() @ t)
        return dx, dt, db, None


class _GatedMlp(torch.autograd.Function):
    """y = h W_down^T + (h a_down^T) b_down^T, of h = act(gate) up and (gate, up) = column (x W^T + t b^T).

    Kept for backward are the base's product (`kept`: `product`; `int8`: rounded; `input`: x, to make it from)
    and the thin ones, not h. t, b, column, and a_down with b_down may be `None`. `stored` are W and W_down as
    they are held.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, t: Tensor, b: Tensor, column: Any, a_down: Any, b_down: Any, stored: Stored,
        stored_down: Stored, act: str, kept: str,
    ) -> torch.Tensor:  # fmt: skip
        gu, in_fp8 = product(x, stored), len(stored_down) == 2
        h, amax, *in_int8 = ops.activate(gu, t, b, column, act, in_fp8, kept == "int8")
        t_down = None
        if in_fp8 and a_down is not None:
            codes, step, t_down = ops.quantise_product(h, None, amax, a_down.t())
            y = fp8_linear.product(codes, step, stored_down[0], stored_down[1], h.dtype)
        elif in_fp8:
            codes, step = ops.quantise_rows(h, None, amax)
            y = fp8_linear.product(codes, step, stored_down[0], stored_down[1], h.dtype)
        else:
            y = product(h, stored_down)
            t_down = None if a_down is None else h @ a_down.t()
        if t_down is not None:
            ops.add_product_(y, t_down, b_down)
        ctx.act, ctx.count, ctx.kept = act, len(stored), kept
        first = in_int8 if kept == "int8" else (x if kept == "input" else gu, None)
        ctx.save_for_backward(*first, t, b, column, a_down, b_down, t_down, *stored, *stored_down)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gu, scale, t, b, column, a_down, b_down, t_down, *stored = ctx.saved_tensors
        grad, first = grads[0].contiguous(), stored[: ctx.count]
        if ctx.kept == "input" and len(first) > 2:  # dequantised once for both products
            first = (ops.dequantise(list(first), grad.dtype, grad),)
        if ctx.kept == "input":
            gu = product(ops.later(gu, grad), first)
        dh = input_gradient(grad, stored[ctx.count :])
        dt_down = None if a_down is None else grad @ b_down
        db_down = None if a_down is None else grad.t() @ t_down
        weight_scale = first[1].flatten() if len(first) == 2 else None
        dgu, amax, dcolumn, db, da_down = ops.activate_backward(
            gu, t, b, column, ctx.act, dh, dt_down, a_down, weight_scale, scale
        )
        dt = dx = None
        if weight_scale is None or not ctx.needs_input_grad[0]:
            dt = None if t is None else dgu @ b
            dx = input_gradient(dgu, first) if ctx.needs_input_grad[0] else None
        else:
            if t is None:
                codes, step = ops.quantise_rows(dgu, weight_scale, amax)
            else:
                codes, step, dt = ops.quantise_product(dgu, weight_scale, amax, b)
            dx = fp8_linear.codes_gradient(codes, step, first[0], grad.dtype)
        dcolumn, db = None if column is None else dcolumn, None if t is None else db
        return dx, dt, db, dcolumn, None if a_down is None else da_down, db_down, *[None] * 4
