"""Set the fused forwards of `fused_lora` on the layers of a model, and count the layers that stay unfused.

PEFT's modules keep their weights, names and state. Only `forward` of the instance is replaced. PEFT's own
forward runs outside of training, with a disabled or merged adapter, and with several adapters.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import adalora, ia3, lora
from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from finetune.autoconfig.compilation import MAX_RANK, fused_unsupported_reason
from finetune.core import upstream_private
from finetune.kernels.ops import ACTIVATIONS
from finetune.models import module_names
from finetune.quantization import four_bit, fp8_linear
from finetune.speed import dora_norm, lm_head_loss
from finetune.speed.forward_comparison import allowed_difference, changed_parameters, relative_difference
from finetune.speed.fused_experts import FusedExperts
from finetune.speed.fused_lora import Stack, base_layer_of, gated_mlp, project

log = logging.getLogger("finetune")
TYPES: tuple[Any, ...] = (lora.Linear, adalora.SVDLinear, ia3.Linear)
if is_bnb_4bit_available():
    TYPES += (lora.Linear4bit, adalora.SVDLinear4bit, ia3.Linear4bit)
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that share their input
TOKENS = 64  # tokens on which a fused module is compared with its own forward


class Group(NamedTuple):
    """Linear layers that were fused together."""

    members: list[Any]
    called: list[Any]  # modules with a replaced forward: the members, or the MLP of the members


class Fused:
    """The fused layers of a model.

    Attributes:
        served: number of linear layers with a fused forward.
        mlps: number of gated MLPs that are fused as a whole.
        parts: number of gated MLPs with only their linear layers fused, by reason.
        left: number of layers with an adapter that are not fused, by reason.
        worst: the largest relative difference of a fused module from its own forward.
        experts: the stacked experts, which run by grouped GEMMs.
        norms: the norms of DoRA layers, which `dora_norm.RefreshNorms` updates after each optimizer step.
    """

    def __init__(self, model: Any, layers: list[nn.Module], *, every_pass: bool = False) -> None:
        """Fuse the decoder layers of a PEFT model where possible.

        Every fused module is compared with its own forward. A module with another result gets its own forward
        back.

        Args:
            every_pass: whether to update DoRA's norms before each forward pass with gradients, for a training
                loop that does not call back after the optimizer step.
        """
        self.left, self.worst, self.parts = Counter[str](), 0.0, Counter[str]()
        self.every_pass = every_pass
        fast, groups = set[nn.Module](), list[Group]()
        against = fused_unsupported_reason(model.config)
        every = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
        for layer in [] if against else layers:
            adapted = [m for m in layer.modules() if isinstance(m, BaseTunerLayer)] or every[:1]
            for module in layer.modules():
                if drops := _drops(module):
                    self.parts["down_proj has lora_dropout, set it to 0 to fuse whole MLPs"] += 1
                whole = [] if drops else _mlp(module, fast, adapted)
                groups += whole or _stacks(module, fast)
        magnitudes = [m for m in fast if getattr(m, "lora_magnitude_vector", None)]
        self.norms = dora_norm.Norms(magnitudes) if magnitudes else None
        # the hook is on the decoder, because the chunked loss calls the decoder and not the model
        decoder = module_names.decoder_of(lm_head_loss.base_model_of(model))
        groups = self._right(groups, fast)
        self.experts = FusedExperts(model, [] if against else layers, every)
        fast |= self.experts.wrappers()
        self.worst = max(self.worst, self.experts.worst)
        self.hook = decoder.register_forward_pre_hook(self.start) if groups or self.experts.served else None
        self.stacks = {id(s): s for g in groups for m in g.called for s in _stacks_of(m)}.values()
        # Hooks of a user's own loop run only in PEFT's forward, because the fused one calls no inner module
        called = [module for group in groups for module in group.called] if every_pass else []
        self.inner = [(_stacks_of(module), list(module.modules())[1:]) for module in called]
        self.passed_on = 0
        self.served = sum(len(group.members) for group in groups)
        self.mlps = sum(group.called != group.members for group in groups)
        reason = against or "finetune has no fused forward for it"
        for module in model.modules():
            if isinstance(module, BaseTunerLayer) and module not in fast:
                self.left[unsupported_reason(module) or reason] += 1
        model.finetune_norms = self.norms
        model.finetune_fused_by = self

    def summary(self) -> str:
        """Describe the number of fused linear layers and experts, and the unfused layers with reasons."""
        parts = [f"{count} MLPs partly fused: {reason}" for reason, count in sorted(self.parts.items())]
        experts = self.experts.summary()
        return "; ".join(filter(None, [f"{self.served} linear layers", experts, self.left_out(), *parts]))

    def left_out(self) -> str:
        """Describe the number of layers with an adapter that run PEFT's own forward, by reason."""
        return "; ".join(f"{count} by PEFT: {reason}" for reason, count in sorted(self.left.items()))

    def start(self, *_: object) -> None:
        """Prepare a forward pass: drop outputs of a failed pass, and update the norms."""
        followed = False
        for stack in self.stacks:
            stack.x, stack.ready = None, {}
            followed |= stack.follow()
        for stacks, modules in self.inner:
            if any(map(upstream_private.has_hooks, modules)):
                for stack in stacks:
                    stack.reason = "an inner module has hooks"
        self._report()
        if self.norms and followed:
            self.norms.rebased()
        if self.norms:
            self.norms.refresh(stepped=self.every_pass and torch.is_grad_enabled())
        self.experts.refresh()

    def _report(self) -> None:
        """Log if other layers than in the last pass run PEFT's own forward."""
        reasons = Counter(stack.reason for stack in self.stacks if stack.reason for _ in stack.layers)
        if reasons.total() != self.passed_on:
            said = "; ".join(f"{count} layers by PEFT: {reason}" for reason, count in sorted(reasons.items()))
            log.info("fused layers have changed: %s", said or "all are fused again")
        self.passed_on = reasons.total()

    def _right(self, groups: list[Group], fast: set[nn.Module]) -> list[Group]:
        """Return the groups with correct results. The modules of other groups get their own forwards back.

        If an MLP can't be fused as a whole, its linear layers are tested alone, because their kernels need
        less memory.
        """
        right, failed, parts = list[Group](), list[tuple[Group, str]](), list[Group]()
        for group, error in zip(groups, self._errors(groups), strict=True):
            if not error:
                right.append(group)
                continue
            for module in group.called:
                del module.forward, module.finetune_fused
            if group.called == group.members:
                self.left[error] += sum(map(_adapted, group.members))
            else:
                failed.append((group, error))
                fast.difference_update(group.members)
                parts += _stacks(group.called[0], fast)
        right += self._right(parts, fast) if parts else []
        served = {member for group in right for member in group.members}
        self.parts.update(error for group, error in failed if served & set(group.members))
        return right

    def _errors(self, groups: list[Group]) -> list[str]:
        """Return the error of each group with nonzero adapters, or an empty string."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad(), _comparable([m for group in groups for m in group.called], generator):
            if self.norms:
                self.norms.refresh()
            errors = [self._error(group, generator) for group in groups]
        if self.norms:
            self.norms.refresh()
        return errors

    def _error(self, group: Group, generator: torch.Generator) -> str:
        inside: Any = base_layer_of(group.members[0])
        stored: torch.dtype = inside.weight.dtype
        dtype = getattr(inside, "compute_dtype", stored)
        if four_bit.is_four_bit(inside):  # the fused forward uses exactly the dequantized weight
            stored = dtype = four_bit.compute_dtype(inside)
        x = torch.randn(1, TOKENS, inside.in_features, generator=generator).to(inside.weight.device, dtype)
        own = torch.cat([type(module).forward(module, x) for module in group.called], dim=-1)
        try:
            ours = torch.cat([module.forward(x) for module in group.called], dim=-1)
            with torch.enable_grad():  # a kernel of the backward pass may fail too
                leaf = x.clone().requires_grad_()
                expected_output = torch.cat([module.forward(leaf) for module in group.called], dim=-1)
                torch.autograd.grad(expected_output, leaf, torch.ones_like(expected_output))
        except Exception as error:  # such as a kernel that does not fit this GPU; PEFT's own forward runs
            return f"the fused forward or backward pass fails here: {' '.join(str(error).split())[:120]}"
        error = relative_difference(ours, own)
        if error <= allowed_difference(stored):
            self.worst = max(self.worst, error)
            return ""
        return f"the fused forward differs from PEFT's own by {error:.0e}"


def _stacks_of(module: Any) -> list[Stack]:
    return [one for one in module.finetune_fused if isinstance(one, Stack)]


def _drops(module: nn.Module) -> bool:
    """Return whether an MLP's last layer has adapter dropout, which a fused MLP does not support."""
    down = getattr(module, "down_proj", None)
    return isinstance(down, lora.LoraLayer) and _dropout(down)


def _mlp(module: Any, fast: set[nn.Module], adapted: list[Any]) -> list[Group]:
    """Replace the forward of a gated MLP that can be fused as a whole; return nothing for other modules.

    Args:
        fast: the modules of all groups, to which the modules of this group are added.
        adapted: layers with an adapter in the decoder layer, which show whether the adapter is enabled.
    """
    down, act = getattr(module, "down_proj", None), getattr(module, "act_fn", None)
    act = ACTIVATIONS.get(type(getattr(module, "activation_fn", act)).__name__)
    first: list[Any] = [getattr(module, name, None) for name in TOGETHER[1]]
    if first == [None, None]:
        first = [getattr(module, "gate_up_proj", None)]
    members: list[Any] = [*first, down]
    if (
        act is None
        or "forward" in vars(module)
        or fast & set(members)
        or not all(isinstance(one, nn.Module) for one in members)
    ):
        return []
    if any(map(unsupported_reason, members)) or not alike(first):
        return []
    if not any(map(_adapted, members)) and not isinstance(base_layer_of(members[-1]), fp8_linear.Fp8Linear):
        return []  # without an adapter, fusing saves only the rounding to fp8
    if any(base_layer_of(one).bias is not None for one in members) or any(map(_entered, first)):
        return []
    both, last = Stack(first, adapted), Stack([down], adapted)
    module.finetune_fused = (both, last, act)
    module.forward = MethodType(_mlp_forward, module)
    fast.update(members)
    return [Group(members, [module])]


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    both, down, act = self.finetune_fused
    if both.active() and down.active():
        return gated_mlp(both, down, act, x)
    return type(self).forward(self, x)


def _stacks(module: nn.Module, fast: set[nn.Module]) -> list[Group]:
    """Replace the forwards of a module's linear layers that run as one, and add the layers to `fast`."""
    groups: list[Group] = []
    alone = dict(module.named_children())
    for names in (*TOGETHER, *((name,) for name in list(alone))):
        members: list[Any] = [alone.get(name) for name in names]
        if any(one is None or one in fast or not _linear(one) for one in members):
            continue
        if any(map(unsupported_reason, members)) or not alike(members) or not any(map(_adapted, members)):
            continue
        stack = Stack(members)
        for place, member in enumerate(members):
            member.finetune_fused = (stack, place)
            member.forward = MethodType(_stacked_forward, member)
            alone.pop(names[place])
        fast.update(members)
        groups.append(Group(members, members))
    return groups


def _stacked_forward(self: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Run a layer of a stack. The first layer that gets an input computes the outputs of all layers."""
    stack, place = self.finetune_fused
    if args or kwargs or not stack.active():
        return type(self).forward(self, x, *args, **kwargs)
    if stack.x is not x or place not in stack.ready or stack.tracked != torch.is_grad_enabled():
        parts = list(project(stack, x).split(stack.sizes, dim=-1))
        if len(parts) == 1:
            return parts[0]
        if len(parts) == 3:  # attention saves the values, and a view would keep all three outputs
            parts[2] = parts[2].contiguous()
        # set after the GEMMs, because checkpointing may end its recomputation during them
        stack.x, stack.ready, stack.tracked = x, dict(enumerate(parts)), torch.is_grad_enabled()
    y = stack.ready.pop(place)
    if not stack.ready:
        stack.x = None
    return y


def unsupported_reason(layer: Any) -> str:
    """Return why a linear layer can't be fused; the empty string if it can."""
    base = base_layer_of(layer)
    if type(base) not in (nn.Linear, fp8_linear.Fp8Linear) and not four_bit.is_four_bit(base):
        return f"the base model is stored as {type(base).__name__}"
    if type(base.weight) not in (torch.Tensor, nn.Parameter) and not four_bit.is_four_bit(base):
        return f"the base model is stored as {type(base.weight).__name__}"  # torchao's own tensors
    if isinstance(layer, BaseTunerLayer) and not isinstance(layer, TYPES):
        return f"{type(layer).__module__.split('.')[-2]} has its own forward pass"
    if four_bit.is_four_bit(base) and (reason := four_bit.unsupported_reason(base)):
        return reason
    if any(parameter.requires_grad for parameter in base.parameters()):
        return "the base weights train"
    if "forward" in vars(layer):
        return "another library has replaced its forward"
    if not isinstance(layer, BaseTunerLayer):
        return ""
    if len(layer.active_adapters) != 1:
        return "it has several adapters"
    name, adapter = layer.active_adapters[0], cast("Any", layer)
    if name not in (adapter.ia3_l if isinstance(layer, IA3Layer) else adapter.r):
        return f"it has no weights of the active adapter {name}"
    if isinstance(layer, IA3Layer):
        return "IA3 also scales the bias" if base.bias is not None else ""
    rank = adapter.r[name]
    if rank > MAX_RANK:
        return f"rank {rank} is larger than {MAX_RANK}"
    if getattr(adapter, "lora_bias", {}).get(name):
        return "lora_bias"
    variant = getattr(adapter, "lora_variant", {}).get(name)
    if variant is not None and name not in adapter.lora_magnitude_vector:
        return f"{type(variant).__name__} has its own forward pass"
    if variant is not None and _dropout(adapter):
        return "DoRA with dropout also changes the base layer's input"
    return ""


def alike(members: list[Any]) -> bool:
    """Return whether layers can be stacked: the same input size, storage and dtype, and all or no biases."""
    bases = [base_layer_of(one) for one in members]
    kinds = {(type(b), b.in_features, b.weight.dtype, b.weight.device, b.bias is None) for b in bases}
    ranks = [one.r[one.active_adapters[0]] for one in members if isinstance(one, lora.LoraLayer)]
    together = len(members) == 1 or not any(map(_entered, members))
    return len(kinds) == 1 and sum(ranks) <= MAX_RANK and together


def _linear(module: nn.Module) -> bool:
    return isinstance(base_layer_of(module), nn.Linear)


def _adapted(module: nn.Module) -> bool:
    return isinstance(module, BaseTunerLayer)


def _entered(layer: nn.Module) -> bool:
    """Return whether an IA3 layer scales its input, which other layers must not use."""
    return isinstance(layer, IA3Layer) and bool(layer.is_feedforward)


def _dropout(layer: LoraLayer) -> bool:
    dropouts: Any = layer.lora_dropout  # an adapter of other layers has none here
    return any(isinstance(dropouts[name], nn.Dropout) for name in layer.active_adapters if name in dropouts)


@contextlib.contextmanager
def _comparable(modules: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """Put modules into training mode without dropout and with changed parameters; restore all afterwards."""
    training = [(module, module.training) for one in modules for module in one.modules()]
    dropouts = [(module, module.p) for module, _ in training if isinstance(module, nn.Dropout)]
    for module in modules:
        module.train()
    for dropout, _ in dropouts:
        dropout.p = 0.0
    try:
        with changed_parameters(modules, generator):
            yield
    finally:
        for module, mode in training:
            module.training = mode
        for dropout, p in dropouts:
            dropout.p = p
