"""Quantisation-aware training by torchao (`speed.qat`): forward rounds weights as they will be stored.

    speed: {qat: {config: IntxWeightOnlyConfig, weight_dtype: int4, group_size: 32}}

Rounded ("fake-quantised") is the weight that will be stored. Under an adapter that is the base's weight with
the adapter merged into it, not the base's alone: rounding W and adding BA would train BA against errors that
rounding W + BA no longer makes. The gradient passes the rounding unchanged (straight-through). The price is a
whole merged weight and its gradient for each layer and step (`kept_gib`). Every linear layer but the
head takes part, and no embedding. Nothing here imports torch before it is called.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Exit, Problem, UserError
from finetune.recipe import qat_rules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Qat


def describe(section: Qat) -> str:
    scales = f"in groups of {section.group_size}" if section.group_size else "with a scale for each output"
    return f"{qat_rules.class_name(section.config)}: {section.weight_dtype} {scales}"


def torchao_config(section: Qat) -> Any:
    """torchao's config with which weights are stored after training.

    Raises:
        UserError: torchao is not installed (exit 3).
    """
    absent = qat_rules.missing()
    if absent:
        raise UserError(absent, code=Exit.ENVIRONMENT)
    import torch
    from torchao import quantization

    name, size = qat_rules.class_name(section.config), section.group_size
    granularity = quantization.PerGroup(size) if size else quantization.PerAxis(0)
    config = getattr(quantization, name)
    (key,) = (field.name for field in fields(config) if field.name.endswith("granularity"))
    return config(**{"weight_dtype": torch.__dict__[section.weight_dtype], key: granularity})


def prepare(model: PreTrainedModel, section: Qat | None, ledger: RunChecks | None = None) -> Any:
    """Make the decoder's linear layers round their weights in forward; `None` changes nothing.

    Done before an adapter is put on, whose own matrices are never rounded. The weights keep their values
    and names, and the adapter starts from the first weights that it would have without.

    Raises:
        UserError: torchao is not installed (exit 3); widths that are no multiple of the group (exit 2).
    """
    if section is None:
        return model
    config = torchao_config(section)
    from torch import nn, random
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig, QATStep

    head = model.get_output_embeddings()
    linear: dict[str, nn.Linear] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    check_group_size(section, {name: layer.in_features for name, layer in linear.items()})
    with random.fork_rng(
        [model.device] if model.device.type == "cuda" else []
    ):  # new layers draw first weights
        quantize_(model, QATConfig(config, step=QATStep.PREPARE), filter_fn=lambda _, name: name in linear)
    if ledger:
        how = "layers that torchao prepared, of those that are linear and not the output head"
        got = f"{len(rounding(model))} layers, {describe(section)}"
        ledger.add("speed.qat", f"{len(linear)} layers, {describe(section)}", got, how)
    return model


def check_group_size(section: Qat, inputs: Mapping[str, int]) -> None:
    """Refuse groups that do not divide the inputs of every linear layer (exit 2).

    Args:
        inputs: of each linear layer but the head, by its name.
    """
    size = section.group_size or 1
    uneven = [f"{name} ({width})" for name, width in sorted(inputs.items()) if width % size]
    if uneven:
        found = f"{', '.join(uneven[:3])}{' ...' if len(uneven) > 3 else ''}"
        what, fix = f"inputs of these layers are no multiple of {size}", "a divisor, or group_size: null"
        raise UserError(Problem(what, "speed.qat.group_size", found=found, fix=fix))


def rounding(model: torch.nn.Module) -> dict[str, Any]:
    """The layers that round their weight in forward, by name; not the idle originals of trained copies."""
    torchao = sys.modules.get("torchao.quantization.qat.linear")  # what was never imported made no layer
    if torchao is None:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torchao.FakeQuantizedLinear) and ".original_module" not in name
    }


def kept_gib(model: torch.nn.Module) -> float:
    """Memory that rounded weights take until backward, in GiB, with nothing recomputed.

    8 bytes a weight: so much is kept in fp32, and 6 under bf16 autocast (counted by `saved_tensors_hooks`).
    """
    return sum(8 * layer.weight.numel() for layer in rounding(model).values()) / 2**30


def follow(adapted: nn.Module) -> Any:
    """Make each adapted layer round its merged weight; without `prepare` before it, nothing changes.

    Raises:
        UserError: an adapter whose merged weight is not known here (exit 2).
    """
    prepared = {id(layer) for layer in rounding(adapted).values()}
    if not prepared:
        return adapted
    for name, layer in adapted.named_modules():
        if hasattr(layer, "disable_adapters") and id(getattr(layer, "base_layer", None)) in prepared:
            layer.forward = partial(_forward, layer, _merging(name, layer))
    return adapted


def _forward(
    layer: Any, merged: Callable[[Any], Merged], x: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """PEFT's layer with the rounded merged weight: (..., inputs) -> (..., outputs), in the dtype of `x` or of
    autocast. With the adapter off it is the base, rounded."""
    import torch

    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        return base(x)
    with torch.autocast(x.device.type, enabled=False):  # merged as it will be saved: not in bf16
        weight, bias = merged(layer)
        weight = base.weight_fake_quantizer(weight)
    if base.activation_fake_quantizer is not None:
        x = base.activation_fake_quantizer(x)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Merged(NamedTuple):
    weight: torch.Tensor  # (outputs, inputs), fp32 where either the base or the adapter is
    bias: torch.Tensor | None


def _merging(name: str, layer: nn.Module) -> Callable[[Any], Merged]:
    """The function that merges an adapted layer as PEFT's own `merge` does, and lets gradients pass."""
    from peft.tuners import adalora, ia3, lora
    from peft.tuners.lora.variants import DoraLinearVariant

    variant = getattr(layer, "lora_variant", {}).get("default")
    biased = getattr(layer, "lora_bias", {}).get("default", False)
    if type(layer) is ia3.Linear:
        return _scaled
    if type(layer) is lora.Linear and isinstance(variant, DoraLinearVariant) and not biased:
        return _decomposed
    if type(layer) in (lora.Linear, adalora.SVDLinear) and variant is None and not biased:
        return _added
    found = f"{type(layer).__module__}.{type(layer).__name__}, {type(variant).__name__}, lora_bias {biased}"
    what = "speed.qat rounds the merged weight, which is not known here for this kind of layer"
    raise UserError(Problem(what, "adapter", found=f"{name}: {found}", fix="type: lora, with fewer options"))


def _added(layer: Any) -> Merged:
    """LoRA and AdaLoRA: W + s B A."""
    base = layer.base_layer
    return Merged(base.weight + layer.get_delta_weight("default"), base.bias)


def _decomposed(layer: Any) -> Merged:
    """DoRA (arXiv 2402.09353): m (W + s B A) / ||W + s B A||; as in PEFT the norm passes no gradient."""
    weight, bias = _added(layer)
    dora = layer.lora_magnitude_vector["default"]
    norm = dora.get_weight_norm(weight, weight.new_zeros(()), scaling=0).detach()
    return Merged((dora.weight / norm).view(-1, 1) * weight, bias)


def _scaled(layer: Any) -> Merged:
    """(IA)^3: a scale for each input of the feed-forward's layers, for each output of the others."""
    base, scale = layer.base_layer, layer.ia3_l["default"]
    bias = base.bias if base.bias is None or layer.is_feedforward else base.bias * scale.flatten()
    return Merged(base.weight * scale, bias)


class Watch:
    """Whether each layer's rounding ran and what it did, seen by hooks on torchao's own quantisers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = rounding(model)
        self.seen: dict[str, torch.Tensor] = {}
        self.hooks = [
            layer.weight_fake_quantizer.register_forward_hook(partial(self._saw, name))
            for name, layer in self.layers.items()
        ]

    def _saw(self, name: str, quantiser: object, inputs: tuple[Any, ...], rounded: torch.Tensor) -> None:
        weight = inputs[0].detach().float()
        self.seen[name] = (rounded.detach().float() - weight).norm() / weight.norm()

    def add_receipt(self, ledger: RunChecks) -> None:
        """Rounding must have changed every layer's weight; without `speed.qat` nothing is said."""
        changes = [float(change) for change in self.seen.values()]
        changed = sum(change > 0 for change in changes)
        if not self.layers:
            return
        share = f", by {sum(changes) / max(1, len(changes)):.2%} of its norm on average"
        asked, got = f"{len(self.layers)} layers round their weight", f"{changed} layers"
        how = "||rounded - weight|| / ||weight|| in the first forward of training"
        ledger.add("rounding in step 1", asked, got + share, how, ok=changed == len(self.layers))
