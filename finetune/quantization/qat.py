"""Quantization-aware training with torchao (`speed.qat`).

    speed: {qat: {config: IntxWeightOnlyConfig, weight_dtype: int4, group_size: 32}}

The forward pass rounds ("fake-quantizes") the weight that will be stored. With an adapter this is the merged
weight W + BA. Rounding W and adding BA would train BA against rounding errors that the merged weight does not
have. The gradient passes the rounding unchanged (straight-through estimator). The cost is a full merged
weight and its gradient for each layer and step (`kept_gib`). All linear layers except the head take part, and
embeddings do not. This module imports torch only inside its functions.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Exit, Problem, UserError, raise_if_any
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
    """Return torchao's config for storing the weights after training.

    Raises:
        UserError: torchao is not installed (exit 3).
    """
    raise_if_any([qat_rules.missing()], code=Exit.ENVIRONMENT)
    import torch
    from torchao import quantization

    name, size = qat_rules.class_name(section.config), section.group_size
    granularity = quantization.PerGroup(size) if size else quantization.PerAxis(0)
    config = getattr(quantization, name)
    (key,) = (field.name for field in fields(config) if field.name.endswith("granularity"))
    return config(**{"weight_dtype": torch.__dict__[section.weight_dtype], key: granularity})


def prepare(model: PreTrainedModel, section: Qat | None, checks: RunChecks | None = None) -> Any:
    """Make the decoder's linear layers round their weights in the forward pass. `None` changes nothing.

    Call this before adding an adapter, so that the adapter's own matrices are not rounded. Weights and names
    stay the same, and so does the adapter initialization.

    Raises:
        UserError: torchao is not installed (exit 3), or an input size is not a multiple of the group size
            (exit 2).
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
    ):  # new layers draw initial weights, so restore the random state
        quantize_(model, QATConfig(config, step=QATStep.PREPARE), filter_fn=lambda _, name: name in linear)
    if checks:
        checks.add(
            "speed.qat",
            expected=f"{len(linear)} layers, {describe(section)}",
            actual=f"{len(rounding(model))} layers, {describe(section)}",
            how="layers that torchao prepared, of those that are linear and not the output head",
        )
    return model


def check_group_size(section: Qat, inputs: Mapping[str, int]) -> None:
    """Raise a UserError if the group size does not divide the input size of every linear layer (exit 2).

    Args:
        inputs: input size of each linear layer except the head, by name.
    """
    size = section.group_size or 1
    uneven = [f"{name} ({width})" for name, width in sorted(inputs.items()) if width % size]
    if uneven:
        found = f"{', '.join(uneven[:3])}{' ...' if len(uneven) > 3 else ''}"
        raise UserError(
            Problem(
                "the group size does not divide the inputs of these layers",
                "speed.qat.group_size",
                found=f"{size}; {found}",
                expected="a divisor of each input",
                fix="group_size: null",
                code="quantization",
            )
        )


def rounding(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that round their weight in the forward pass, by name.

    Unused originals of `modules_to_save` copies are not included.
    """
    # Without this import no such layer can exist
    torchao = sys.modules.get("torchao.quantization.qat.linear")
    if torchao is None:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torchao.FakeQuantizedLinear) and ".original_module" not in name
    }


def kept_gib(model: torch.nn.Module) -> float:
    """Return the memory in GiB that rounded weights take until the backward pass, without recomputation.

    The estimate is 8 bytes per weight, measured in fp32 with `saved_tensors_hooks`. Under bf16 autocast it is
    6 bytes.
    """
    return sum(8 * layer.weight.numel() for layer in rounding(model).values()) / 2**30


def follow(adapted: nn.Module) -> Any:
    """Make each adapted layer round its merged weight. Without a previous `prepare` this changes nothing.

    Raises:
        UserError: the merged weight is not known for this type of adapter (exit 2).
    """
    prepared = {id(layer) for layer in rounding(adapted).values()}
    if not prepared:
        return adapted
    for name, layer in adapted.named_modules():
        if hasattr(layer, "disable_adapters") and id(getattr(layer, "base_layer", None)) in prepared:
            layer.forward = partial(_forward, layer, _merging(name, layer))
    return adapted


def _forward(
    layer: Any, merged: Callable[[Any], Merged], x: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """Run PEFT's layer with the rounded merged weight: (..., inputs) -> (..., outputs).

    The output has the dtype of `x` or of autocast. With the adapter disabled, the layer rounds only the base
    weight.
    """
    import torch

    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        return base(x)
    with torch.autocast(x.device.type, enabled=False):  # merge in the dtype of the saved weights, not in bf16
        weight, bias = merged(layer)
        weight = base.weight_fake_quantizer(weight)
    if base.activation_fake_quantizer is not None:
        x = base.activation_fake_quantizer(x)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Merged(NamedTuple):
    weight: torch.Tensor  # (outputs, inputs), fp32 if the base weight or the adapter is fp32
    bias: torch.Tensor | None


def _merging(name: str, layer: nn.Module) -> Callable[[Any], Merged]:
    """Return a differentiable function that merges an adapted layer as PEFT's `merge` does."""
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
    found, fix = f"{name}: {found}", "use adapter.type: lora, with fewer options"
    raise UserError(
        Problem(
            "`speed.qat` does not support this adapter layer",
            "adapter",
            found=found,
            fix=fix,
            why="QAT needs the merged weight of the layer",
            code="speed-option",
        )
    )


def _added(layer: Any) -> Merged:
    """Merge LoRA or AdaLoRA: W + s B A."""
    base = layer.base_layer
    return Merged(base.weight + layer.get_delta_weight("default"), base.bias)


def _decomposed(layer: Any) -> Merged:
    """Merge DoRA (arXiv 2402.09353): m (W + s B A) / ||W + s B A||. As in PEFT, the norm has no gradient."""
    weight, bias = _added(layer)
    dora = layer.lora_magnitude_vector["default"]
    norm = dora.get_weight_norm(weight, weight.new_zeros(()), scaling=0).detach()
    return Merged((dora.weight / norm).view(-1, 1) * weight, bias)


def _scaled(layer: Any) -> Merged:
    """Merge (IA)^3: a scale for each input of feed-forward layers, and for each output of other layers."""
    base, scale = layer.base_layer, layer.ia3_l["default"]
    bias = base.bias if base.bias is None or layer.is_feedforward else base.bias * scale.flatten()
    return Merged(base.weight * scale, bias)


class Watch:
    """Record whether each layer's rounding ran and changed the weight, with hooks on torchao's quantizers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.layers = rounding(model)
        self.seen: dict[str, torch.Tensor] = {}
        self.hooks = [
            layer.weight_fake_quantizer.register_forward_hook(partial(self._saw, name))
            for name, layer in self.layers.items()
        ]

    def _saw(self, name: str, quantizer: object, inputs: tuple[Any, ...], rounded: torch.Tensor) -> None:
        weight = inputs[0].detach().float()
        self.seen[name] = (rounded.detach().float() - weight).norm() / weight.norm()

    def add_run_check(self, checks: RunChecks) -> None:
        """Add a run check that rounding changed every layer's weight. Without `speed.qat`, add nothing."""
        changes = [float(change) for change in self.seen.values()]
        changed = sum(change > 0 for change in changes)
        if not self.layers:
            return
        share = f", by {sum(changes) / max(1, len(changes)):.2%} of its norm on average"
        expected, actual = f"{len(self.layers)} layers quantize their weight", f"{changed} layers"
        checks.add(
            "fake quantization in step 1",
            expected=expected,
            actual=actual + share,
            how="||rounded - weight|| / ||weight|| in the first forward pass of training",
            ok=changed == len(self.layers),
        )
