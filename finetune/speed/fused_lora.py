"""Compute LoRA, DoRA, AdaLoRA and IA3 on frozen layers with one formula and few kernels.

    y = column * (x W^T + (x a^T) b^T)

Layers with the same input (q, k and v; gate and up) run as one GEMM with the base weights and one with the
adapters, whose b form one block-diagonal matrix. The scaling is folded into a. One kernel adds to y. In an
MLP, one kernel computes the activation and its adapters' GEMMs, and the backward pass recomputes its output.
Only x, a, b and column have gradients, because W is frozen.

W is a tuple of tensors: `(weight,)`; `(codes, scale)` in fp8; or packed weight, absmax and table of each
layer in 4 bits. A 4-bit weight is dequantized once in the forward pass and once in the backward pass, and not
saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft.tuners.adalora import AdaLoraLayer
from peft.tuners.ia3 import IA3Layer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from finetune.core import upstream_private
from finetune.kernels import ops
from finetune.quantization import four_bit, fp8_linear
from finetune.speed import dora_norm

Stored = Sequence[torch.Tensor]  # a frozen weight in its storage format


class Factors(NamedTuple):
    """The factors of an adapter in the formula. A factor that the adapter lacks is `None`."""

    a: torch.Tensor | None = None  # [r, in], including the scaling
    b: torch.Tensor | None = None  # [out, r]
    column: torch.Tensor | None = None  # [out]
    entry: torch.Tensor | None = None  # [in], a factor of x in IA3's feedforward layers


def factors(layer: nn.Module) -> Factors:
    """Return the factors of a layer's adapter, computed from PEFT's own trainable parameters."""
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


def base_layer_of(layer: nn.Module) -> Any:
    """Return the frozen layer under an adapter, or the layer itself."""
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


class Stack:
    """Layers with the same input that run as one.

    Attributes:
        stored: the base weights [sum of outputs, in] in their storage format. They share memory with the
            tensors of the layers.
        bias: [sum of outputs], which shares memory with the biases of the layers, or `None`.
        reason: why the fused forward may not run in this pass; empty if it may.
    """

    def __init__(self, layers: list[Any], adapted: list[Any] | None = None) -> None:
        """
        Args:
            adapted: layers that show whether the adapter is enabled, if none of `layers` has an adapter.
        """
        bases = [base_layer_of(layer) for layer in layers]
        own: list[Any] = [layer for layer in layers if isinstance(layer, BaseTunerLayer)]
        self.adapted = own or adapted or []
        self.adapters = [layer.active_adapters for layer in self.adapted]
        self.layers, self.sizes = layers, [base.out_features for base in bases]
        self.stored = held(bases)
        self.bias = _biases(bases)
        self.places, self.reason = _places(bases), ""
        self.x: torch.Tensor | None = None  # the input of the outputs in `ready`
        self.ready: dict[int, torch.Tensor] = {}
        self.tracked = True  # whether the outputs have gradients
        self.kept = "product"  # saved for the backward pass of gate and up: `product`, `int8` or `input`

    def active(self) -> bool:
        """Return whether the fused forward may run: in training, with the same unmerged adapter."""
        return (
            not self.reason
            and self.layers[0].training
            and all(
                layer.active_adapters == names and not layer.disable_adapters and not layer.merged
                for layer, names in zip(self.adapted, self.adapters, strict=True)
            )
        )

    def follow(self) -> bool:
        """Read the base weights again if they have changed, and return whether they have changed.

        PEFT replaces them when it merges or unmerges an adapter. `load_state_dict` changes them in place. As
        soon as they train, PEFT's own forward runs.
        """
        bases = [base_layer_of(layer) for layer in self.layers]
        trains = any(tensor.requires_grad for base in bases for tensor in _tensors(base))
        self.reason = "the base weights train" if trains else ""
        if _places(bases) == self.places:
            return False
        self.stored, self.bias = held(bases), _biases(bases)
        self.places = _places(bases)
        return True


def _tensors(base: Any) -> list[torch.Tensor]:
    return [base.weight] if base.bias is None else [base.weight, base.bias]


def _places(bases: list[Any]) -> list[tuple[int, int]]:
    """Return where the tensors of some layers are, and how often each was changed in place."""
    tensors = [tensor for base in bases for tensor in _tensors(base)]
    return [(tensor.data_ptr(), upstream_private.version(tensor)) for tensor in tensors]


def _biases(bases: list[Any]) -> torch.Tensor | None:
    return None if bases[0].bias is None else behind_each_other([base.bias for base in bases])


def held(bases: list[Any]) -> Stored:
    """Return the frozen weights of layers in their storage format."""
    if four_bit.is_four_bit(bases[0]):
        return tuple(tensor for base in bases for tensor in four_bit.stored(base))
    weight = behind_each_other([base.weight for base in bases])
    if isinstance(bases[0], fp8_linear.Fp8Linear):
        return weight, behind_each_other([base.weight_scale for base in bases])
    return (weight,)


def behind_each_other(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along their rows, and make each of them a view of the result."""
    if len(tensors) == 1:
        return tensors[0].detach()
    whole, start = torch.cat([tensor.detach() for tensor in tensors]), 0
    for tensor in tensors:
        tensor.data = whole[start : start + len(tensor)]
        start += len(tensor)
    return whole


def project(stack: Stack, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs [..., sum of outputs] of all layers of a stack for x [..., in]."""
    flat = rows_of(x)
    stack_factors = [factors(layer) for layer in stack.layers]
    if stack_factors[0].entry is not None:  # such a layer is never stacked with others
        flat = (flat * stack_factors[0].entry).to(flat.dtype)
    t, b = inner(flat, stack.layers, stack_factors), outer(flat, stack.sizes, stack_factors)
    y = _Linear.apply(flat, t, b, stack.stored)
    column = columns(stack.sizes, stack_factors, flat)
    y = y if column is None else (y * column).to(y.dtype)
    y = y if stack.bias is None else y + stack.bias.to(y.dtype)
    return y.view(*x.shape[:-1], y.shape[-1])


def gated_mlp(both: Stack, down: Stack, act: str, x: torch.Tensor) -> torch.Tensor:
    """Return down(act(gate(x)) * up(x)) for x [..., hidden]. `both` is gate and up, or one layer for both."""
    flat = rows_of(x)
    stack_factors = [factors(layer) for layer in both.layers]
    halves = stack_factors if len(stack_factors) == 2 else split(stack_factors[0])
    size = sum(both.sizes) // 2
    t = inner(flat, both.layers, stack_factors, even=True)
    if (
        t is not None and len(stack_factors) == 1
    ):  # one adapter for both halves has one GEMM and one dropout mask
        t = torch.cat([t, t], dim=1)
    b = outer(flat, [size, size], halves, even=True)
    column, last = columns([size, size], halves, flat), factors(down.layers[0])
    if last.entry is not None:  # a factor of act(gate) * up equals a factor of up
        plain = torch.ones(2 * size, device=flat.device) if column is None else column
        column = plain * torch.cat([torch.ones_like(last.entry), last.entry])
    a_down, b_down = last.a, outer(flat, down.sizes, [last])
    if a_down is not None and b_down is not None:
        a_down = nn.functional.pad(a_down.to(flat.dtype), (0, 0, 0, b_down.shape[1] - len(a_down)))
    y = _GatedMlp.apply(flat, t, b, column, a_down, b_down, both.stored, down.stored, act, both.kept)
    y = y if last.column is None else (y * last.column).to(y.dtype)
    return y.view(x.shape)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., in] as [T, in] in autocast's dtype, because a norm that trains returns float32."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return x.reshape(-1, x.shape[-1]).to(dtype)


def split(both: Factors) -> list[Factors]:
    """Return the adapter of a layer for gate and up as two adapters that share a."""
    columns = (None, None) if both.column is None else both.column.chunk(2)
    rows = (None, None) if both.b is None else both.b.chunk(2)
    return [Factors(both.a, b, column) for b, column in zip(rows, columns, strict=True)]


def inner(
    x: torch.Tensor, layers: list[Any], stack_factors: list[Factors], *, even: bool = False
) -> torch.Tensor | None:
    """Return x [T, in] times the stacked a of the layers, [T, padded ranks]; `None` without adapters.

    Args:
        even: whether every layer has the same number of columns.
    """
    size = padded(stack_factors, even)
    if size == 0:
        return None
    share, rows, dropouts = size // len(stack_factors), [], []
    for layer, factor in zip(layers, stack_factors, strict=True):
        rank = 0 if factor.a is None else len(factor.a)
        a = x.new_zeros(0, x.shape[1]) if factor.a is None else factor.a.to(x.dtype)
        rows.append(nn.functional.pad(a, (0, 0, 0, share - rank)) if even else a)
        dropouts.append(layer.lora_dropout[layer.active_adapters[0]] if rank else nn.Identity())
    if any(isinstance(dropout, nn.Dropout) for dropout in dropouts):  # each layer has its own mask
        t = torch.cat([dropout(x) @ a.t() for dropout, a in zip(dropouts, rows, strict=True)], dim=1)
        return nn.functional.pad(t, (0, size - t.shape[1]))
    a = torch.cat(rows)
    return x @ nn.functional.pad(a, (0, 0, 0, size - len(a))).t()


def outer(
    x: torch.Tensor, sizes: list[int], stack_factors: list[Factors], *, even: bool = False
) -> torch.Tensor | None:
    """Return the layers' b as one block-diagonal matrix [sum of sizes, padded ranks], or `None`."""
    size = padded(stack_factors, even)
    if size == 0:
        return None
    start, rows = 0, []
    for index, (out, factor) in enumerate(zip(sizes, stack_factors, strict=True)):
        start = index * (size // len(stack_factors)) if even else start
        b = x.new_zeros(out, 0) if factor.b is None else factor.b.to(x.dtype)
        rows.append(nn.functional.pad(b, (start, size - start - b.shape[1])))
        start += b.shape[1]
    return torch.cat(rows)


def padded(stack_factors: list[Factors], even: bool) -> int:
    """Return the inner dimension of the adapter GEMM: a power of two of at least 16; 0 without adapters."""
    ranks = [0 if factor.b is None else factor.b.shape[1] for factor in stack_factors]
    if not any(ranks):
        return 0
    if even:
        return len(stack_factors) * max(16, 1 << (max(ranks) - 1).bit_length())
    return max(16, 1 << (sum(ranks) - 1).bit_length())


def columns(sizes: list[int], stack_factors: list[Factors], like: torch.Tensor) -> torch.Tensor | None:
    """Return the layers' columns as one tensor [sum of sizes]; `None` without columns."""
    if all(factor.column is None for factor in stack_factors):
        return None
    ones = [torch.ones(size, device=like.device) for size in sizes]
    return torch.cat(
        [one if f.column is None else f.column for one, f in zip(ones, stack_factors, strict=True)]
    )


def product(x: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Return x [T, in] W^T for a frozen weight [out, in] in its storage format, in fp8 for an fp8 weight."""
    if len(stored) == 2:
        codes, step = ops.quantize_rows(x)
        return fp8_linear.product(codes, step, stored[0], stored[1], x.dtype)
    weight = stored[0].to(x.dtype) if len(stored) == 1 else ops.dequantize(list(stored), x.dtype)
    return x @ weight.t()


def input_gradient(grad: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Return the gradient of x in `product`."""
    if len(stored) == 2:
        return fp8_linear.input_gradient(grad, stored[0], stored[1])
    if len(stored) == 1:
        return grad @ stored[0].to(grad.dtype)
    return grad @ ops.dequantize(list(stored), grad.dtype, grad)


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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        t, b, *stored = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx = input_gradient(grad, stored) if ctx.needs_input_grad[0] else None
        dt, db = (None, None) if t is None else (grad @ b, grad.t() @ t)
        return dx, dt, db, None


class _GatedMlp(torch.autograd.Function):
    """y = h W_down^T + (h a_down^T) b_down^T, with h = act(gate) up and (gate, up) = column (x W^T + t b^T).

    The backward pass uses the output of the base GEMM and the outputs of the thin GEMMs, but not h. `kept`
    tells what is saved of the base GEMM: its output (`product`), its output in int8, or its `input` x. t, b,
    column, and a_down with b_down may be `None`. `stored` and `stored_down` are W and W_down in their storage
    format.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, t: Tensor, b: Tensor, column: Tensor | None, a_down: Tensor | None,
        b_down: Any, stored: Stored, stored_down: Stored, act: str, kept: str,
    ) -> torch.Tensor:  # fmt: skip
        gu, in_fp8 = product(x, stored), len(stored_down) == 2
        h, amax, *in_int8 = ops.activate(gu, t, b, column, act, in_fp8, kept == "int8")
        t_down = None
        if in_fp8 and a_down is not None:
            codes, step, t_down = ops.quantize_product(h, None, amax, a_down.t())
            y = fp8_linear.product(codes, step, stored_down[0], stored_down[1], h.dtype)
        elif in_fp8:
            codes, step = ops.quantize_rows(h, None, amax)
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
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        gu, scale, t, b, column, a_down, b_down, t_down, *stored = ctx.saved_tensors
        grad, first = grads[0].contiguous(), stored[: ctx.count]
        if ctx.kept == "input" and len(first) > 2:  # dequantized once for both GEMMs
            first = (ops.dequantize(list(first), grad.dtype, grad),)
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
                codes, step = ops.quantize_rows(dgu, weight_scale, amax)
            else:
                codes, step, dt = ops.quantize_product(dgu, weight_scale, amax, b)
            dx = fp8_linear.codes_gradient(codes, step, first[0], grad.dtype)
        dcolumn, db = None if column is None else dcolumn, None if t is None else db
        return dx, dt, db, dcolumn, None if a_down is None else da_down, db_down, *[None] * 4
