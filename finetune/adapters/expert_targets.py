"""Turn a recipe's targets into PEFT's options on a model with stacked experts.

transformers 5 stacks the experts of a layer in two parameters, which LoRA adapts as `target_parameters`.
Users still write the names that experts' layers had in transformers 4. PEFT rewrites such names for some
families (peft 0.21.2, utils/transformers_weight_conversion.py). It also rewrites a shared expert or a dense
MLP, as if these were experts. `resolve` sets both keys, so that PEFT has nothing to rewrite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod, sqrt
from typing import Any, NamedTuple

from finetune.adapters import target_modules, untrainable_layers
from finetune.core import formatting
from finetune.core.model_config import ModelConfig
from finetune.kernels import kernel_limits
from finetune.models import module_names
from finetune.models.module_names import Names
from finetune.recipe import upstream_options

WITH_EXPERTS = target_modules.WITH_EXPERTS
# Parameters of transformers 5, with the names that an expert's layers had in transformers 4. The first
# parameter holds two layers.
LAYERS = {
    "gate_up_proj": (("gate_proj", "w1"), ("up_proj", "w3")),
    "down_proj": (("down_proj", "w2"),),
}
OLD_NAMES = frozenset(name for layers in LAYERS.values() for names in layers for name in names)
# Last parts of names that PEFT takes for experts or a router, by the family in PEFT's table
_REWRITTEN = {
    "mixtral": frozenset({"gate", "w1", "w2", "w3"}),
    "qwen2_moe": frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
}
PEFT_RANK = 16  # used if the rank is not a number; PEFT refuses such options later


class Resolved(NamedTuple):
    """PEFT's options, and the modules and entries that they come from."""

    options: dict[str, Any]
    """PEFT's options. Their targets mean the same with and without PEFT's own rewriting."""
    modules: list[str]
    """Full names of the modules that get an adapter."""
    named: tuple[str, ...] = ()
    """Entries of `target_modules` that name experts or a router."""
    skipped: tuple[str, ...] = ()
    """Full names of targeted linear layers that PEFT would take for experts. They get no adapter."""
    half: str = ""
    """An expert layer that the recipe targets without the other layer of the same parameter."""
    untrained: tuple[str, ...] = ()
    """Full names of linear layers that "all-linear" skips, because an adapter would not train on them."""


def resolve(options: Mapping[str, Any], names: Names, peft: str) -> Resolved:
    """Return the options that PEFT gets for a recipe's options. `check`, `plan` and `train` call this.

    Args:
        peft: PEFT's name of the adapter type.
    """
    options = target_modules.with_targets(options, peft, names)
    targets, stacks = options.get("target_modules"), names.stacked_experts
    every = targets == WITH_EXPERTS
    plain = {**options, "target_modules": target_modules.EVERYTHING} if every else options
    if isinstance(targets, set | frozenset):
        plain = {**plain, "target_modules": sorted(targets)}
    picked, untrained = target_modules.targeted(plain, names), tuple[str, ...]()
    if plain.get("target_modules") == target_modules.EVERYTHING:
        lost = untrainable_layers.reasons(names, peft)
        untrained = tuple(one for one in picked if one in lost)
        picked = [one for one in picked if one not in lost]
    listed = dict(plain)
    if untrained and picked:
        listed["target_modules"] = _targets(plain, picked, list(untrained), names)
    in_both_layouts = rewritten(names)  # PEFT rewrites dense layers too, also if a model has no experts
    if peft != "lora" or targets is None or not (stacks or in_both_layouts):
        return Resolved(listed, picked, untrained=untrained)
    routers = [] if targets in (target_modules.EVERYTHING, WITH_EXPERTS) else _routers(picked, names)
    skipped = [one for one in picked if module_names.short(one) in in_both_layouts and one not in routers]
    experts, half = _experts(plain, stacks, every)
    changes = bool(experts or routers or skipped or every or (in_both_layouts and isinstance(targets, str)))
    if not changes:
        return Resolved(listed, picked, half=half, untrained=untrained)
    modules = [one for one in picked if one not in {*routers, *skipped}]
    entries = (
        [plain["target_modules"]]
        if isinstance(plain["target_modules"], str)
        else [[one] for one in plain["target_modules"]]
    )
    named = [one if isinstance(one, str) else one[0] for one in entries if _names_other(one, stacks, routers)]
    resolved = {**plain, "target_modules": _targets(plain, modules, [*skipped, *routers, *untrained], names)}
    parameters = [*experts, *(f"{one}.weight" for one in routers)]
    own = list(options.get("target_parameters") or ())
    added = [one for one in _shortest(parameters, names) if one not in own]
    if own or added:
        resolved["target_parameters"] = [*own, *added]
    resolved |= _doubled([one for one, count in experts.items() if count > 1], resolved, names)
    return Resolved(resolved, modules, tuple(named), tuple(skipped), half, untrained)


def rewritten(names: Names) -> frozenset[str]:
    """Return the layers of which PEFT knows both layouts of this family's experts."""
    return _REWRITTEN.get(upstream_options.moe_patterns().get(names.family, ""), frozenset())


def _routers(picked: list[str], names: Names) -> list[str]:
    """Return the routers among modules. A router holds a matrix, but PEFT does not adapt it as a linear
    layer.
    """
    return [one for one in picked if "Router" in names.kinds[one] and f"{one}.weight" in names.shapes]


def _experts(
    options: Mapping[str, Any], stacks: list[tuple[str, str]], every: bool
) -> tuple[dict[str, int], str]:
    """Find the parameters of experts that the targets name.

    Returns:
        The number of targeted layers of each parameter, and an expert layer that is targeted without the
        other layer of its parameter.
    """
    counts, half = dict[str, int](), ""
    if options["target_modules"] == target_modules.EVERYTHING and not every:
        return counts, half
    for holder, parameter in stacks:
        name = f"{holder}.{parameter}"
        layers = () if every else LAYERS.get(parameter, ())
        hits = [layer for layer in layers if any(_names_layer(options, holder, one) for one in layer)]
        if len(hits) == len(layers) > 0:
            counts[name] = len(hits)
        elif target_modules.is_targeted(options, name):
            counts[name] = 1
        elif hits:
            half = next(one for one in hits[0] if _names_layer(options, holder, one))
    return counts, half


def _names_layer(options: Mapping[str, Any], holder: str, layer: str) -> bool:
    """Return whether targets name a layer that the experts of a module had in transformers 4."""
    return any(
        target_modules.is_targeted(options, name) for name in (f"{holder}.{layer}", f"{holder}.0.{layer}")
    )


def _names_other(targets: str | list[str], stacks: list[tuple[str, str]], routers: list[str]) -> bool:
    """Return whether targets name experts or a router."""
    if targets == target_modules.EVERYTHING:
        return False
    alone = {"target_modules": targets}
    if any(target_modules.is_targeted(alone, one) for one in routers):
        return True
    experts = any(target_modules.is_targeted(alone, f"{holder}.{name}") for holder, name in stacks)
    return experts or any(
        _names_layer(alone, holder, layer)
        for holder, parameter in stacks
        for layers in LAYERS.get(parameter, ())
        for layer in layers
    )


def _targets(options: Mapping[str, Any], modules: list[str], others: list[str], names: Names) -> list[str]:
    """Return `target_modules` that match exactly these modules, as short as possible."""
    targets = list[str]()
    if not isinstance(options["target_modules"], str):
        usable = (one for one in options["target_modules"] if not _matches(one, others))
        targets = [one for one in usable if _matches(one, modules)]
    rest = [one for one in modules if not any(target_modules.is_suffix(target, one) for target in targets)]
    short = dict.fromkeys(map(module_names.short, rest))
    stacks = (f"{holder}.{parameter}" for holder, parameter in names.stacked_experts)
    known = [*names.kinds, *names.tower_kinds, *stacks]
    for last in short:
        same = [one for one in rest if module_names.short(one) == last]
        alone = not last.isdecimal() and sum(target_modules.is_suffix(last, one) for one in known) == len(
            same
        )
        targets += [last] if alone else same
    return targets


def _matches(target: str, names: list[str]) -> bool:
    return any(target_modules.is_suffix(target, one) for one in names)


def _shortest(parameters: list[str], names: Names) -> list[str]:
    """Return `target_parameters` that match exactly these parameters, with three name parts if possible."""
    shortest = list[str]()
    for end in dict.fromkeys(".".join(one.split(".")[-3:]) for one in parameters):
        same = [one for one in parameters if target_modules.is_suffix(end, one)]
        alone = sum(target_modules.is_suffix(end, one) for one in names.shapes) == len(same)
        shortest += [end] if alone else same
    return shortest


def _doubled(parameters: list[str], options: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return patterns that double the rank of parameters with two layers and keep the scale, as in PEFT."""
    ranks, alphas = dict(options.get("rank_pattern") or {}), dict(options.get("alpha_pattern") or {})
    rank, alpha = options.get("r", 8), options.get("lora_alpha", 8)  # PEFT's defaults
    if not parameters or not isinstance(rank, int) or not isinstance(alpha, int | float):
        return {}
    for end in _shortest(parameters, names):
        if not any(re.match(rf"(.*\.)?({pattern})$", end) for pattern in (*ranks, *alphas)):
            ranks[end], alphas[end] = 2 * rank, sqrt(2) * alpha if options.get("use_rslora") else 2 * alpha
    return {"rank_pattern": ranks, "alpha_pattern": alphas}


def parameter_ranks(options: Mapping[str, Any], names: Names) -> dict[str, int]:
    """Return LoRA's rank on each parameter of `target_parameters`, by its full name."""
    targets = options.get("target_parameters") or ()
    matched = (one for one in names.shapes if any(target_modules.is_suffix(end, one) for end in targets))
    return {one: rank_of(options, one) for one in matched if len(names.shapes[one]) in (2, 3)}


def rank_of(options: Mapping[str, Any], name: str) -> int:
    """Return a layer's rank as PEFT does: from the first matching `rank_pattern`, else `init_r` or `r`."""
    for pattern, rank in (options.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return int(rank)
    rank = options.get("init_r") or options.get("r") or PEFT_RANK
    return rank if isinstance(rank, int) else PEFT_RANK


def parameters_of_rank_1(size: tuple[int, ...]) -> int:
    """Count LoRA's trainable parameters of rank 1 on a weight, stacked by expert or not."""
    return (size[0] if len(size) == 3 else 1) * sum(size[-2:])


def notes(options: Mapping[str, Any], names: Names, peft: str) -> list[str]:
    """Return notes on layers that get no adapter, and on experts with their trainable parameters."""
    key, resolved = "adapter.target_modules", resolve(options, names, peft)
    target = str(options.get("target_modules"))
    said = [untrainable_layers.note(resolved.untrained, names, peft, target)] if resolved.untrained else []
    if options.get("target_modules") == target_modules.EVERYTHING and names.stacked_experts:
        what = f"{key}: {target_modules.EVERYTHING} adapts the linear layers"
        if peft != "lora" or options.get("use_dora"):
            said.append(f"{what}, not the stacked experts. PEFT adapts experts only with LoRA")
        else:
            layers, both = (
                _count(resolve({**options, "target_modules": targets}, names, peft), names)
                for targets in (target_modules.EVERYTHING, WITH_EXPERTS)
            )
            frozen = names.family in kernel_limits.FROZEN_EXPERTS
            only = ", on a base model that is not quantized" if frozen else ""
            said.append(
                f"{what} ({layers:,} trainable parameters), not the stacked experts. "
                f"`{WITH_EXPERTS}` adapts both ({both:,} trainable parameters){only}"
            )
    if resolved.skipped:
        ends = _shortest([f"{one}.weight" for one in resolved.skipped], names)
        layers = ", ".join(end.removesuffix(".weight") for end in ends)
        what = f"{key}: {layers} get no adapter, because PEFT takes their names for names of experts"
        said.append(f"{what}. `target_parameters: [{', '.join(ends)}]` adapts them")
    return said


def storage_note(names: Names, config: ModelConfig, storage: str) -> str:
    """Say what a quantized base model quantizes and what not, with sizes in bf16; empty without experts."""
    linear = formatting.size(sum(2 * prod(names.shapes.get(f"{one}.weight", (0,))) for one in names.linear))
    if not (experts := stacks_in_bf16(names)):
        return ""
    if reason := stays_in_bf16(names, config, storage):
        return f"{linear} of linear layers (in bf16) are quantized. {experts} are not: {reason}"
    return f"{linear} of linear layers and {experts} (in bf16) are quantized"


def stacks_in_bf16(names: Names) -> str:
    """Return the size in bf16 and the names of stacked experts; empty without them."""
    experts = [f"{holder}.{parameter}" for holder, parameter in names.stacked_experts]
    size = formatting.size(sum(2 * prod(names.shapes[one]) for one in experts))
    return f"{size} of {', '.join(_shortest(experts, names))}" if experts else ""


def stays_in_bf16(names: Names, config: ModelConfig, storage: str) -> str:
    """Return why a quantized base model does not quantize stacked experts; empty if it does."""
    if not names.stacked_experts:
        return ""
    if storage not in kernel_limits.EXPERTS_STORAGES:
        return f"{storage} quantizes only nn.Linear layers"
    return kernel_limits.quantized_experts_unsupported_reason(config, names.shapes)


def _count(resolved: Resolved, names: Names) -> int:
    """Count LoRA's trainable parameters, without biases and trained modules."""
    weights = [f"{one}.weight" for one in resolved.modules]
    ranks = {f"{one}.weight": rank_of(resolved.options, one) for one in resolved.modules}
    ranks |= parameter_ranks(resolved.options, names)
    sizes = {one: names.every_shape[one] for one in [*weights, *ranks] if one in names.every_shape}
    return sum(ranks[one] * parameters_of_rank_1(size) for one, size in sizes.items())
