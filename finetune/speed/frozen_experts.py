"""Run quantized experts that `fused_experts` does not support: other gates, biases or weight layouts.

    y = sum over a token's experts of  weight * (gate(x W1 + b1) W2 + b2)

The experts are frozen and have no adapter. Each pass dequantizes a layer's weights and frees them again, and
the backward pass dequantizes them once more. The gate is the module's own function, such as gpt-oss's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize

from finetune.core import upstream_private
from finetune.kernels import expert_ops as ops
from finetune.kernels.kernel_limits import FROZEN_EXPERTS, STACKED
from finetune.quantization import stacked_experts
from finetune.speed.forward_comparison import allowed_difference


class FrozenExperts:
    """The quantized stacked experts of one layer, without an adapter.

    Attributes:
        stored: The quantized tensors of both weights.
        outputs_first: Whether each quantized weight is [E, out, in], and not [E, in, out].
    """

    quantized = True
    wrappers: tuple[Any, ...] = ()

    def __init__(self, module: Any) -> None:
        self.module, self.proving = module, False
        self.refresh()
        module.finetune_experts = self

    def refresh(self) -> None:
        """Read the quantized tensors again, which may have moved or got another dtype since."""
        held = [stacked_experts.of(self.module, name) for name in STACKED]
        self.stored: list[list[Any]] = [by.stored(values.detach()) for values, by in filter(None, held)]
        by = [one[1] for one in held if one]
        self.outputs_first = [one.transposed == self.module.is_transposed for one in by]
        self.dtype: Any = by[0].dtype if by else None
        # Experts, experts' width and hidden size, as of the last weight [E, H, F] or [E, F, H]
        if by:
            experts, *sides = by[1].shape
            self.shape = experts, *(sides if self.module.is_transposed else reversed(sides))
        for tensor in [tensor for tensors in self.stored for tensor in tensors]:
            upstream_private.mark_static_address(tensor)

    def release(self) -> None:
        """Undo it."""
        vars(self.module).pop("finetune_experts", None)

    def active(self) -> bool:
        """Return whether the weights are still quantized."""
        return len(self.stored) == len(STACKED)

    def allowed_difference(self) -> float:
        """Return the largest relative difference from the experts' own forward."""
        return allowed_difference(self.dtype)

    def fp8_unsupported_reason(self) -> str:
        """Return why the GEMMs can't run in fp8."""
        return "the experts have their own gate"

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output for `hidden_states` [T, H], with experts and routing weights [T, K]."""
        x, module = hidden_states.to(self.dtype), self.module
        order, places, ends, _ = ops.sort_by_expert(top_k_index, module.num_experts)
        rows = _Rows.apply(x, places)
        for number, name in enumerate(STACKED):
            rows = _Linear.apply(rows, ends, self.outputs_first[number], self.dtype, *self.stored[number])
            if module.has_bias:
                expert = top_k_index.flatten()[order.long()]
                rows = rows + getattr(module, f"{name}_bias")[expert].to(rows.dtype)
            rows = upstream_private.gate_of(module)(rows) if number == 0 else rows
        return _Sum.apply(rows, top_k_weights, order, places).to(hidden_states.dtype)

    def own_forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the same with transformers' eager forward, which reads dequantized weights."""
        own = type(self.module).forward.__wrapped__
        with parametrize.cached():
            return own(self.module, hidden_states, top_k_index, top_k_weights)


class _Linear(torch.autograd.Function):
    """Multiply the rows of each expert [N, in] by its quantized weight. Only the rows get a gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, ends: Tensor, outputs_first: bool, dtype: torch.dtype, *stored: Tensor
    ) -> Tensor:
        ctx.save_for_backward(ends, *stored)
        ctx.outputs_first, ctx.dtype = outputs_first, dtype
        weight = ops.dequantize_experts(list(stored), None, True, dtype)
        return ops.grouped_mm(rows, weight, ends, outputs_first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        ends, *stored = ctx.saved_tensors
        grad = grads[0].contiguous()
        weight = ops.dequantize_experts(stored, None, True, ctx.dtype, grad)
        return ops.grouped_mm(grad, weight, ends, not ctx.outputs_first), *[None] * (3 + len(stored))


class _Rows(torch.autograd.Function):
    """Copy each token [T, H] to its rows [N, H]. The backward pass sums them in a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.tokens = x.shape[0]
        return ops.rows_of_experts(x, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        (places,) = ctx.saved_tensors
        return ops.sum_of_experts(grads[0].contiguous(), places, None, ctx.tokens), None


class _Sum(torch.autograd.Function):
    """Sum the rows [N, H] of each token, times the routing weights [T, K]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        return ops.sum_of_experts(rows, places, weights.contiguous(), weights.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        rows, weights, order, places = ctx.saved_tensors
        exact = torch.promote_types(rows.dtype, torch.float32)
        grad = ops.rows_of_experts(grads[0].contiguous(), places)
        of_weights = (rows.to(exact) * grad.to(exact)).sum(1)[places.long()].view(weights.shape)
        of_rows = grad * weights.flatten()[order.long()][:, None].to(grad.dtype)
        return of_rows, of_weights.to(weights.dtype), None, None


def unsupported_reason(module: nn.Module, wrappers: list[Any]) -> str:
    """Return why quantized experts can't run frozen. The empty string means that they can."""
    family = getattr(getattr(module, "config", None), "model_type", "")
    if wrappers:
        return f"an adapter on quantized experts of {family} is not supported"
    return "" if family in FROZEN_EXPERTS else f"the experts of {family} have their own forward pass"
