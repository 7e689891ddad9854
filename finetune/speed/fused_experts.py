"""A mixture of experts at the cost of its grouped GEMMs: stacked experts, frozen, with LoRA or without.

    y = sum over a token's experts of  weight * (h W2^T + (h A2^T) B2^T),   h = act(gate) * up,
    (gate, up) = x W1^T + (x A1^T) B1^T

It is registered with transformers' `ExpertsInterface` by the name `finetune`. PEFT's own forward of adapted
experts adds B A to the weights of all experts in every pass, and breaks the graph of torch.compile. Here the
adapters are thin GEMMs. One tensor holds W1 and A1, and another holds W2 and B2, so one grouped GEMM computes
the output of the base and of the adapter. PEFT's parameters stay in their modules and get the gradients.

The model's former implementation runs outside of training, with the adapter off or merged, and with several
adapters. Quantized experts with an adapter run here outside of training, too, and take one adapter at a time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from finetune.core import upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.kernels import expert_ops as ops
from finetune.kernels.kernel_limits import MAX_EXPERTS_RANK, STACKED
from finetune.kernels.ops import ACTIVATIONS, quantize_rows
from finetune.models import module_names
from finetune.quantization import stacked_experts
from finetune.speed import expert_gemms, frozen_experts, lm_head_loss
from finetune.speed.expert_gemms import Routing, StackedWeight
from finetune.speed.forward_comparison import allowed_difference, changed_parameters, relative_difference
from finetune.speed.frozen_experts import FrozenExperts
from finetune.speed.live_model_spec import decoder_layers

Fp8Experts = Literal["auto"] | bool  # `speed.fp8_experts`
# The name of the implementation in transformers' interface.
NAME = "finetune"
FIRST, LAST = STACKED
# Tokens on which the forward is compared with the experts' own, and experts of each token.
TOKENS, EACH = 64, 4
# Largest relative difference of experts in fp8. A value that differs in its last bit of bf16 may be rounded
# to the next code, which is 6 to 12% away. Layers with the sizes of Qwen3-30B-A3B differ by 2.3%.
ALLOWED_IN_FP8 = 5e-2


class Experts:
    """The stacked experts of one layer, and the tensors that hold their weights. s is LoRA's scaling.

    Attributes:
        first: W1 with the rows of A1 [E, 2 F + R, H], or W1 alone without an adapter. If W1 is quantized: A1
            [E, R, H], or `None`.
        last: W2 with the columns of s B2 [E, H, F + R], or W2 alone without an adapter. If W2 is quantized:
            s B2 [E, H, R], or `None`.
        outer: s B1 [E, 2 F, R], or `None`.
        inner: A2 [E, R, F], or `None`.
        fp8_experts: `speed.fp8_experts`.
        fp8: Whether the GEMMs of quantized weights run in fp8.
    """

    def __init__(self, module: Any, wrappers: list[Any], adapted: list[Any]) -> None:
        """
        Args:
            module: The experts module of transformers.
            wrappers: PEFT's wrappers around it, from the outermost.
            adapted: Adapted layers whose state to follow if the experts have no adapter.
        """
        self.module, self.wrappers = module, wrappers
        self.fp8_experts: Fp8Experts = "auto"
        self.by_name = {one.parameter_name: one for one in wrappers}
        self.adapted = wrappers or adapted
        self.adapters = [one.active_adapters for one in self.adapted]
        self.act = ACTIVATIONS[type(module.act_fn).__name__]
        self.proving = self.trains = False
        self.first: Any = None
        self.last: Any = None
        self.hold()
        module.finetune_experts = self
        if wrappers:
            wrappers[0].forward = MethodType(_unwrapped_forward, wrappers[0])

    @torch.no_grad()
    def hold(self) -> None:
        """Allocate tensors for weights and adapters together. The weights become views of them."""
        self.stored = [_stored(self.module, name) for name in (FIRST, LAST)]
        self.quantized, self.fp8 = self.stored[0][0] is not None, False
        ranks = [self._padded(name) for name in (FIRST, LAST)]
        if self.quantized:
            self._hold_adapters(ranks)
            return
        weights: list[Any] = [getattr(self.module, name) for name in (FIRST, LAST)]
        self.shape: Any = weights[0].shape
        experts, self.size = len(weights[0]), weights[0].shape[1] // 2
        self.first, self.last, self.dtype = weights[0].detach(), weights[1].detach(), weights[0].dtype
        self.outer = self.inner = None
        if ranks[0]:
            self.first = nn.functional.pad(self.first, (0, 0, 0, ranks[0]))
            weights[0].data = self.first[:, : 2 * self.size]
            self.outer = self.first.new_zeros(experts, 2 * self.size, ranks[0])
        if ranks[1]:
            self.last = nn.functional.pad(self.last, (0, ranks[1]))
            weights[1].data = self.last[..., : self.size]
            self.inner = self.last.new_zeros(experts, ranks[1], self.size)
        self.places = [weight.data_ptr() for weight in weights]
        self._keep()

    def _hold_adapters(self, ranks: list[int]) -> None:
        """Allocate tensors for the adapters of quantized weights."""
        held: Any = stacked_experts.of(self.module, FIRST)
        self.shape, self.dtype = held[1].shape, held[1].dtype
        experts, both, width = self.shape
        self.size = both // 2
        self.fp8 = self._runs_in_fp8()
        self.first = self.last = self.outer = self.inner = None
        empty = partial(torch.zeros, device=held[0].device, dtype=self.dtype)
        if ranks[0]:
            self.first, self.outer = empty(experts, ranks[0], width), empty(experts, both, ranks[0])
        if ranks[1]:
            self.inner, self.last = empty(experts, ranks[1], self.size), empty(experts, width, ranks[1])
        self._keep()

    def _runs_in_fp8(self) -> bool:
        fp8 = self.fp8_experts is True or (self.fp8_experts == "auto" and self.stored[0][2] is None)
        return fp8 and not self.fp8_unsupported_reason()

    def fp8_unsupported_reason(self) -> str:
        """Return why the GEMMs of the weights can't run in fp8; the empty string if they can."""
        reasons = [expert_gemms.fp8_unsupported_reason(stored, self.dtype) for stored in self.stored]
        return next(filter(None, reasons), "")

    def allowed_difference(self) -> float:
        """Return the largest relative difference from the experts' own forward."""
        return ALLOWED_IN_FP8 if self.fp8 else allowed_difference(self.dtype)

    def _keep(self) -> None:
        """Keep the tensors where they are, and copy the adapter's parameters into them."""
        for tensor in (self.first, self.outer, self.inner, self.last, *self.stored[0], *self.stored[1]):
            if tensor is not None:
                upstream_private.mark_static_address(tensor)
        self.refresh()

    def release(self) -> None:
        """Undo it: give the weights their own memory, and the wrapper its own forward."""
        for name in () if self.quantized else (FIRST, LAST):
            weight = getattr(self.module, name)
            weight.data = weight.data.contiguous()
        vars(self.module).pop("finetune_experts", None)
        if self.wrappers:
            vars(self.wrappers[0]).pop("forward", None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy PEFT's parameters into the tensors, before a forward pass.

        Fused optimizers do not count a new version of a parameter, so it copies in every pass. The copy does
        not count as a new version of the tensors either, since an earlier pass may still need its backward.
        """
        self.trains = any(own.requires_grad for own in self.module.parameters(recurse=False))
        if self.quantized and self._replaced():
            self.hold()
        if not self.quantized and [getattr(self.module, n).data_ptr() for n in (FIRST, LAST)] != self.places:
            self.hold()  # PEFT replaced the weights, to merge an adapter or to undo that
        if self.outer is not None:
            a, b, scale = self._factors(FIRST)
            rows = self.first.data if self.quantized else self.first.data[:, 2 * self.size :]
            rows[:, : a.shape[1]].copy_(a)
            self.outer.data[..., : b.shape[2]].copy_(b * scale)
        if self.inner is not None:
            a, b, scale = self._factors(LAST)
            self.inner.data[:, : a.shape[1]].copy_(a)
            columns = self.last.data if self.quantized else self.last.data[..., self.size :]
            columns[..., : b.shape[2]].copy_(b * scale)

    def _replaced(self) -> bool:
        """Return whether quantized weights were dequantized, moved or given another dtype."""
        held = stacked_experts.of(self.module, FIRST)
        return (
            held is None or held[0].data_ptr() != self.stored[0][0].data_ptr() or held[1].dtype != self.dtype
        )

    def active(self) -> bool:
        """Return whether the module trains on frozen weights with the same adapter, on and not merged.

        Quantized experts need not train. PEFT's own forward would leave its changes on the module
        (peft 0.21.2, ParamWrapper._remove_parametrizations).
        """
        return self.proving or (
            not self.trains
            and (self.module.training or (self.quantized and bool(self.wrappers)))
            and all(
                layer.active_adapters == names and not layer.disable_adapters and not layer.merged
                for layer, names in zip(self.adapted, self.adapters, strict=True)
            )
        )

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output for `hidden_states` [T, H], with experts and routing weights [T, K]."""
        parameters = [p for name in (FIRST, LAST) for p in self._parameters(name)]
        y = _Experts.apply(
            hidden_states.to(self.dtype),
            top_k_weights,
            *parameters,
            top_k_index,
            self.first,
            self.outer,
            self.inner,
            self.last,
            *self.stored[0],
            *self.stored[1],
            self.size,
            self._scales(),
            self.act,
            self.fp8,
        )
        return y.to(hidden_states.dtype)

    def _parameters(self, name: str) -> list[Any]:
        if name not in self.by_name:
            return [None, None]
        wrapper: Any = self.by_name[name]
        adapter = wrapper.active_adapters[0]
        return [wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight]

    def _scales(self) -> list[float]:
        found = [self.by_name.get(name) for name in (FIRST, LAST)]
        return [1.0 if one is None else one.scaling[one.active_adapters[0]] for one in found]

    def _factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return A [E, r, in], B [E, out, r] and the scaling.

        PEFT orders the rows of A by expert and rank, and the columns of B by rank and expert
        (peft 0.21.2, tuners/lora/layer.py, ParamWrapper.get_delta_factors).
        """
        a, b = self._parameters(name)
        wrapper: Any = self.by_name[name]
        experts = wrapper.num_experts
        scale = wrapper.scaling[wrapper.active_adapters[0]]
        return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1), scale

    def _padded(self, name: str) -> int:
        wrapper: Any = self.by_name.get(name)
        rank = wrapper.r[wrapper.active_adapters[0]] if wrapper is not None else 0
        return padded(rank) if rank else 0


def padded(rank: int) -> int:
    """Round a rank up to a power of two of at least 16, as the kernels need it."""
    return max(16, 1 << (rank - 1).bit_length())


class _Experts(torch.autograd.Function):
    """The formula above, with the gradients of x, the routing weights and PEFT's parameters.

    Backward needs x and [gate | up | x A1^T]. It recomputes h and gathers the rows of x again. The gradient
    of a routing weight is <dy W2, h>, so backward does not need the experts' outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, a1: Tensor | None, b1: Tensor | None, a2: Tensor | None,
        b2: Tensor | None, ids: Tensor, first: Tensor | None, outer: Tensor | None, inner: Tensor | None,
        last: Tensor | None, first_values: Tensor | None, first_scale: Tensor | None,
        first_table: Tensor | None, last_values: Tensor | None, last_scale: Tensor | None,
        last_table: Tensor | None, size: int, scales: list[float], act: str, fp8: bool,
    ) -> torch.Tensor:  # fmt: skip
        held_first = StackedWeight(first, first_values, first_scale, first_table, fp8)
        held_last = StackedWeight(last, last_values, last_scale, last_table, fp8)
        stacked_weight: Any = first if first_values is None else first_values
        routing = Routing(*ops.sort_by_expert(ids, stacked_weight.shape[0]), ids.shape[1])
        weights = weights.contiguous()
        z = expert_gemms.gate_up(x, held_first, routing)
        h = ops.activate_experts(z, outer, inner, routing.tiles, size, act)
        y = expert_gemms.down(h, held_last, routing)
        y = ops.sum_of_experts(y, routing.places, weights, x.shape[0])
        ctx.size, ctx.act, ctx.scales, ctx.fp8 = size, act, scales, fp8
        ctx.shapes = [None if one is None else (one.shape, one.dtype) for one in (a1, b1, a2, b2)]
        ctx.save_for_backward(x, weights, z, *routing[:4], outer, inner, *held_first[:4], *held_last[:4])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's own is *args)
        saved = ctx.saved_tensors
        x, weights, z, order, places, ends, tiles, outer, inner = saved[:9]
        held_first, held_last = (
            StackedWeight(*saved[9:13], fp8=ctx.fp8),
            StackedWeight(*saved[13:], fp8=ctx.fp8),
        )
        dy, each, wide = grads[0].contiguous(), weights.shape[1], 2 * ctx.size
        routing = Routing(order, places, ends, tiles, each)
        g = expert_gemms.down_gradient(dy, held_last, routing)
        dz, h, thin, dweights = ops.activate_experts_backward(
            z, outer, inner, g, weights, order, tiles, ctx.size, ctx.act
        )
        dx = expert_gemms.gate_up_gradient(dz, held_first, routing)
        dx = ops.sum_of_experts(dx, places, None, x.shape[0])
        da1 = db1 = da2 = db2 = None
        if outer is not None:
            da1 = _inner(ops.product_of_experts(dz[:, wide:], x, ends, order, each), ctx.shapes[0])
            db1 = ops.product_of_experts(z[:, wide:], dz[:, :wide], ends, None, each)
            db1 = _outer(db1, ctx.scales[0], ctx.shapes[1])
        if inner is not None:
            rank = inner.shape[1]
            da2 = _inner(ops.product_of_experts(thin[:, :rank], h, ends, None, each), ctx.shapes[2])
            db2 = ops.product_of_experts(thin[:, rank:], dy, ends, order, each)
            db2 = _outer(db2, ctx.scales[1], ctx.shapes[3])
        return dx, dweights.to(weights.dtype), da1, db1, da2, db2, *[None] * 15


def _stored(module: nn.Module, name: str) -> list[Any]:
    """Return the tensors of a quantized weight, or three times `None`."""
    held = stacked_experts.of(module, name)
    tensors = held[1].stored(held[0].detach()) if held else []
    return [*tensors, *[None] * (3 - len(tensors))]


def _inner(gradient: torch.Tensor, like: tuple[Any, torch.dtype]) -> torch.Tensor:
    """Return the gradient of PEFT's A from [E, padded rank, in]."""
    shape, dtype = like
    return gradient[:, : shape[0] // gradient.shape[0]].reshape(shape).to(dtype)


def _outer(gradient: torch.Tensor, scale: float, like: tuple[Any, torch.dtype]) -> torch.Tensor:
    """Return the gradient of PEFT's B from that of s B [E, padded rank, out]."""
    shape, dtype = like
    gradient = gradient[:, : shape[1] // gradient.shape[0]] * scale
    return gradient.permute(2, 1, 0).reshape(shape).to(dtype)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run an experts module. transformers calls it instead of the module's own forward."""
    experts: Experts | None = getattr(self, "finetune_experts", None)
    # PEFT's wrappers call adapted experts themselves, so a module without its wrappers has no adapter
    if experts is not None and not experts.wrappers and experts.active():
        return experts.forward(hidden_states, top_k_index, top_k_weights)
    own = type(self).forward.__wrapped__  # the forward under transformers' decorator, which `eager` means
    before = getattr(self, "finetune_before", "eager")
    return ExpertsInterface().get_interface(before, own)(self, hidden_states, top_k_index, top_k_weights)


def _unwrapped_forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Any:
    """Replace the forward of PEFT's outermost wrapper, which would add B A to the weights."""
    experts: Experts = self.get_base_layer().finetune_experts
    if experts.active():
        return experts.forward(*args, **kwargs)
    if experts.quantized and not self.disable_adapters:
        what, fix = "quantized experts run one adapter at a time", "model.set_adapter(NAME)"
        found = ", ".join(self.active_adapters)
        raise UserError(Problem(what, found=found, fix=fix, code="quantization"), code=Exit.ENVIRONMENT)
    return type(self).forward(self, *args, **kwargs)


class FusedExperts:
    """The stacked experts of a model.

    Attributes:
        served: The experts that run fused, by layer.
        installed: Experts that run fused already, because they are quantized.
        left: The number of layers whose experts keep their own forward, by the reason.
        worst: The largest relative difference between a fused forward and its module's own.
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, layers: list[nn.Module], adapted: list[Any]
    ) -> None:
        """Fuse the stacked experts of decoder layers, after a comparison with their own forward.

        Args:
            layers: Decoder layers, or a module around them for experts outside of them.
            adapted: Adapted layers whose state to follow if the experts have no adapter. Experts follow one
                of their own decoder layer, else torch.compile would take the first layer for other code.
        """
        self.served, self.left, self.worst = list[Experts | FrozenExperts](), Counter[str](), 0.0
        self.installed = list[Experts | FrozenExperts]()
        self.base, self.before = lm_head_loss.base_model_of(model), dict[str, Any]()
        followed = set(adapted)
        seen = set[nn.Module]()
        for layer, module, wrappers in [(one, *stack) for one in layers for stack in stacked(one)]:
            if module in seen:
                continue
            seen.add(module)
            if installed := vars(module).get("finetune_experts"):
                self.installed.append(installed)
            elif reason := unsupported_reason(module, wrappers):
                quantized = stacked_experts.of(module, FIRST) is not None
                reason = frozen_experts.unsupported_reason(module, wrappers) if quantized else reason
                if reason:
                    self.left[reason] += 1
                else:
                    self.served.append(FrozenExperts(module))
            else:
                near = [one for one in layer.modules() if one in followed] or adapted
                self.served.append(Experts(module, wrappers, near[:1]))
        if not self.served:
            return
        ExpertsInterface.register(NAME, experts_forward)
        self.before = self.base.get_experts_implementation()
        for module in self.base.modules():
            if hasattr(module, "is_concatenated"):  # set by transformers' decorator
                module.finetune_before = upstream_private.experts_name(module.config)
        self.base.set_experts_implementation(NAME)
        self._prove()

    def summary(self) -> str:
        """Say how many layers have fused experts, and why others do not. It is empty without experts."""
        left = [f"{count} by transformers: {reason}" for reason, count in sorted(self.left.items())]
        served = [*self.served, *self.installed]
        total = len(served) + sum(self.left.values())
        in_fp8 = sum(isinstance(one, Experts) and one.fp8 for one in served)
        gemms = f", {in_fp8} with fp8 GEMMs" if in_fp8 else ""
        return "; ".join([f"experts of {len(served)} of {total} layers{gemms}", *left]) if total else ""

    def wrappers(self) -> set[nn.Module]:
        """Return PEFT's wrappers around fused experts."""
        return {wrapper for one in (*self.served, *self.installed) for wrapper in one.wrappers}

    def refresh(self) -> None:
        """Copy PEFT's parameters, before a forward pass."""
        for one in self.served:
            one.refresh()

    def remove(self) -> None:
        """Undo it in every layer."""
        for one in self.served:
            one.release()
        if not self.before:
            return
        self.base.set_experts_implementation(self.before)
        for module in self.base.modules():
            vars(module).pop("finetune_before", None)

    def _prove(self) -> None:
        """Undo it for experts whose fused forward differs from their own or fails."""
        for one in list(self.served):
            error, reason = float("nan"), "their fused forward differs from their own"
            try:
                error = difference(one)
            except torch.OutOfMemoryError:
                raise
            except Exception as failed:  # such as a kernel that does not fit this GPU
                reason = f"their fused forward or backward fails here: {' '.join(str(failed).split())[:120]}"
            if error <= one.allowed_difference():
                self.worst = max(self.worst, error)
                continue
            self.served.remove(one)
            self.left[reason] += 1
            one.release()


def install_quantized(model: PreTrainedModel | PeftModel) -> None:
    """Run the quantized experts of a PEFT model fused from now on, in training and outside of it.

    Raises:
        UserError: they can't run fused (exit 3).
    """
    if not stacked_experts.all_of(model):
        return
    adapted = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    fused = FusedExperts(model, [*decoder_layers(model), model], adapted)
    if fused.left:
        why = "; ".join(fused.left)
        what, fix = "finetune can't train on quantized experts with this adapter", "model.quantization: none"
        problem = Problem(what, "model.quantization", fix=fix, why=why, code="quantization")
        raise UserError(problem, code=Exit.ENVIRONMENT)
    for one in fused.served:
        for wrapper in one.wrappers:
            wrapper.merge = MethodType(_refuse_merge, wrapper)
    decoder = module_names.decoder_of(lm_head_loss.base_model_of(model))
    decoder.register_forward_pre_hook(lambda *_: fused.refresh())


def choose_fp8(model: nn.Module, fp8_experts: Fp8Experts) -> str:
    """Choose the precision of the GEMMs of quantized experts, after `install_quantized`.

    GEMMs in another precision are compared with the experts' own forward, as in `FusedExperts`.

    Args:
        fp8_experts: `speed.fp8_experts`.

    Returns:
        Why some of them can't run in fp8; the empty string if all can.
    """
    found = [vars(module).get("finetune_experts") for module in model.modules()]
    quantized = [one for one in found if one is not None and one.quantized]
    differing = ""
    for one in quantized:
        if isinstance(one, Experts) and one.fp8_experts != fp8_experts:
            was_fp8, before = one.fp8, one.fp8_experts
            one.fp8_experts = fp8_experts
            one.hold()
            if one.fp8 != was_fp8 and not difference(one) <= one.allowed_difference():
                one.fp8_experts, differing = before, "their fused forward differs from their own"
                one.hold()
    reasons = filter(None, (one.fp8_unsupported_reason() for one in quantized))
    return next(reasons, differing if quantized else "the experts are not quantized")


def _refuse_merge(self: Any, *args: object, **kwargs: object) -> Any:
    if stacked_experts.of(self.get_base_layer(), self.parameter_name) is None:  # dequantized since
        return type(self).merge(self, *args, **kwargs)
    raise stacked_experts.merge_refusal()


def stacked(layer: nn.Module) -> list[tuple[Any, list[Any]]]:
    """Find the experts of a decoder layer whose weights are stacked in one parameter, and PEFT's wrappers."""
    found, seen = list[tuple[Any, list[Any]]](), set[nn.Module]()
    for module in layer.modules():
        wrappers, inside = list[Any](), module
        while isinstance(inside, ParamWrapper):
            wrappers.append(inside)
            inside = inside.base_layer
        if inside not in seen and _is_stack(inside):
            found.append((inside, wrappers))
            seen.add(inside)
    return found


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module holds stacked experts, without reading quantized ones."""
    held = stacked_experts.of(module, FIRST)
    return bool(held) or getattr(getattr(module, FIRST, None), "ndim", 0) == 3


def unsupported_reason(module: nn.Module, wrappers: list[Any]) -> str:
    """Return why experts can't run fused. The empty string means that they can."""
    if not hasattr(module, "is_concatenated") or not hasattr(type(module).forward, "__wrapped__"):
        return f"{type(module).__name__} has its own forward pass"
    if module.has_bias or not module.has_gate or module.is_transposed or not module.is_concatenated:
        return "the experts have a bias, no gate, or weights in another order"
    if {_read_name(name) for name, _ in module.named_parameters()} != {FIRST, LAST}:
        return "the experts have other parameters, too"
    if upstream_private.gate_of(type(module)).__module__ != ExpertsInterface.__module__:
        return "the experts have a gate of their own"
    if type(module.act_fn).__name__ not in ACTIVATIONS:
        return f"the experts' activation is {type(module.act_fn).__name__}"
    if upstream_private.is_expert_parallel(module):
        return "expert parallelism splits the experts"
    if stacked_experts.of(module, FIRST):
        return next(filter(None, map(_wrapper_unsupported_reason, wrappers)), "")
    weights: list[Any] = [getattr(module, name) for name in (FIRST, LAST)]
    if any(type(one) is not nn.Parameter or not one.is_floating_point() for one in weights):
        return f"the experts are stored as {type(weights[0]).__name__}"
    if any(one.requires_grad for one in weights):
        return "the experts train"
    return next(filter(None, map(_wrapper_unsupported_reason, wrappers)), "")


def _read_name(name: str) -> str:
    """Return the name by which a module reads a parameter, from the name of a quantized one."""
    return name.removeprefix("parametrizations.").removesuffix(".original")


def _wrapper_unsupported_reason(wrapper: ParamWrapper) -> str:
    if wrapper.parameter_name not in (FIRST, LAST):
        return f"{wrapper.parameter_name} has an adapter"
    if len(wrapper.active_adapters) != 1:
        return "it has several adapters"
    if "forward" in vars(wrapper):
        return "another library has replaced its forward"
    name = wrapper.active_adapters[0]
    if name not in wrapper.r:
        return f"they have no weights of the active adapter {name}"
    rank = wrapper.r[name]
    return f"rank {rank} is larger than {MAX_EXPERTS_RANK}" if rank > MAX_EXPERTS_RANK else ""


@torch.no_grad()
def difference(experts: Experts | FrozenExperts) -> float:
    """Return the relative difference of both forwards, with adapters that are not zero."""
    module, made = experts.module, torch.Generator().manual_seed(0)
    called = experts.wrappers[0] if experts.wrappers else module
    (count, _, width), device = experts.shape, next(module.parameters()).device
    each = min(count, EACH)
    x = torch.randn(TOKENS, width, generator=made).to(device, experts.dtype)
    weights = torch.rand(TOKENS, each, generator=made).to(device, experts.dtype)
    ids = torch.rand(TOKENS, count, generator=made).topk(each).indices.to(x.device)
    with _with_changed_adapters(experts, made):
        before, module.finetune_before = module.finetune_before, "eager"
        training = module.training
        if isinstance(experts, FrozenExperts):
            own = experts.own_forward(x, ids, weights)
        elif experts.quantized:
            own = _expert_by_expert(experts, x, ids, weights)
        else:
            own = type(called).forward(called.eval(), x, ids, weights)
        called.train(training)
        module.finetune_before, experts.proving = before, True
        try:
            ours = called(x, ids, weights)
            with torch.enable_grad():  # a backward kernel may not fit this GPU
                leaf = x.clone().requires_grad_()
                again = called(leaf, ids, weights)
                torch.autograd.grad(again, leaf, torch.ones_like(again))
        finally:
            experts.proving = False
    return relative_difference(ours, own)


def _expert_by_expert(
    experts: Experts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the output with the dequantized weights and PEFT's change of them.

    If the GEMMs run in fp8, rows and weights are rounded to fp8. Weights that are in fp8 stay the same.
    """
    dtype = torch.float32 if experts.fp8 else experts.dtype  # rounding twice would give other fp8 values
    stored = [[tensor for tensor in one if tensor is not None] for one in experts.stored]
    first, last = (ops.dequantize_experts(one, None, True, dtype) for one in stored)
    first_change, last_change = (
        experts.by_name[name].get_delta_weight(experts.adapters[0][0])
        if name in experts.by_name
        else torch.zeros_like(weight, dtype=experts.dtype)
        for name, weight in ((FIRST, first), (LAST, last))
    )

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        if not experts.fp8:
            return rows
        codes, scale = quantize_rows(rows)
        return (codes.float() * scale).to(experts.dtype)

    y = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        both = rounded(x[token]) @ rounded(first[expert]).t() + x[token] @ first_change[expert].t()
        gate, up = both.chunk(2, dim=-1)
        h = experts.module.act_fn(gate) * up
        made = rounded(h) @ rounded(last[expert]).t() + h @ last_change[expert].t()
        y.index_add_(0, token, made * weights[token, place, None])
    return y


@contextlib.contextmanager
def _with_changed_adapters(experts: Experts | FrozenExperts, made: torch.Generator) -> Iterator[None]:
    """Change the adapters' parameters a little, and restore them afterwards."""
    try:
        with changed_parameters(list(experts.wrappers), made):
            experts.refresh()
            yield
    finally:
        experts.refresh()
