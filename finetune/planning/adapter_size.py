"""Estimate an adapter from its model's config: layers, trainable parameters, and whether it can run fused."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from finetune.adapters import expert_targets, target_modules
from finetune.autoconfig.compilation import MAX_RANK
from finetune.kernels import kernel_limits
from finetune.models import module_names
from finetune.models.architecture import Architecture
from finetune.recipe import adapter_types
from finetune.recipe.schema import Adapter, Model

# Rank assumed for adapter types whose parameters are not counted: their `r` has another meaning.
RANK = 16
FUSED_TYPES = ("lora", "adalora", "ia3")
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")


class Adapted(NamedTuple):
    """The size of an adapter, and whether it can run fused."""

    names: list[str]
    """Linear layers that the adapter changes."""
    trained: int
    """Trainable parameters."""
    rank: int
    """The largest rank; 0 for IA3 and full fine-tuning."""
    dropout: bool
    columns: bool
    """The adapter scales each output by a trained vector: DoRA, IA3."""
    fusable: bool
    """The MLPs can run fused (`speed.fused`)."""
    mlps: bool = False
    """The adapter changes a layer of every MLP, so every MLP can run fused as a whole."""
    allocates: bool = False
    """AdaLoRA: it keeps fp32 averages of each parameter's importance."""
    unknown: str = ""
    """A note on what the plan does not count; the empty string if it counts everything."""
    unsupported_reason: str = ""
    """Why none of the layers can run fused."""
    saved: int = 0
    """Trainable parameters of whole modules (`modules_to_save`)."""
    head: bool = False
    """The output head trains."""
    experts: int = 0
    """Trainable parameters of expert weights and of other parameters outside of linear layers."""
    fast_experts: bool = False
    """The model has stacked experts that run by `speed.fused_experts`."""


def adapted(adapter: Adapter, model: Model, found: Architecture, steps: int) -> Adapted:
    """Return the layers that an adapter changes and its trainable parameters; `full` trains every parameter.

    Trainable parameters per layer:

    - LoRA: `r * (inputs + outputs)`. DoRA adds `outputs` for the magnitude.
    - AdaLoRA: `init_r * (inputs + outputs + 1)`.
    - IA3: `inputs` in feed-forward modules, else `outputs`.
    """
    kind, text = adapter_types.find(adapter.type), found.config.get_text_config()
    if not kind.peft:
        return Adapted([], found.trained_by_full, 0, False, False, False)
    linear = found.linear
    options: dict[str, Any] = {**kind.defaults, **adapter.options(), **kind.sets}
    options = target_modules.with_targets(options, kind.peft, found.names)
    if kind.build:
        options |= kind.build(options, max(steps, 12), linear, found.names.family)
    resolved = expert_targets.resolve(options, found.names, kind.peft)
    options, names = resolved.options, [name for name in resolved.modules if name in linear]
    counted = kind.peft in FUSED_TYPES
    dropout, dora = bool(options.get("lora_dropout")), bool(options.get("use_dora"))
    trained, largest = 0, 0
    for name in names:
        outputs, inputs = linear[name]
        rank = 0 if kind.peft == "ia3" else expert_targets.rank_of(options, name) if counted else RANK
        largest = max(largest, rank)
        if kind.peft == "ia3":
            forward = target_modules.match(options.get("feedforward_modules") or [], [name])
            trained += inputs if any(forward.values()) else outputs
            continue
        trained += rank * (inputs + outputs) + (rank if kind.peft == "adalora" else 0)
        trained += outputs * (dora + bool(options.get("lora_bias")))
    ends = tuple(options.get("modules_to_save") or ())
    whole = [name for name in found.names.parameters if name.rpartition(".")[0].endswith(ends)]
    head = bool(ends) and found.names.head.endswith(ends)
    # PEFT trains a copy of a tied head.
    whole += [f"{found.names.embedding}.weight"] * (head and found.names.tied)
    saved = sum(prod(found.tensors[name]) for name in whole)
    rows = len(model.add_tokens) * (2 - found.names.tied) * text.hidden_size
    ranks = expert_targets.parameter_ranks(options, found.names) if kind.peft == "lora" else {}
    sides = {name: expert_targets.parameters_of_rank_1(found.names.shapes[name]) for name in ranks}
    experts = sum(rank * sides[name] for name, rank in ranks.items())
    unknown = f"the plan does not know the size of {adapter.type}, and assumes LoRA with r {RANK}"
    unsupported_reason = _unsupported_reason(kind.peft, options, largest)
    if any(found.names.kinds[name] == "Conv1D" for name in names):
        unsupported_reason = unsupported_reason or "the base model is stored as Conv1D"
    act = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    fits = largest * 3 <= MAX_RANK and act in kernel_limits.FUSED_ACTIVATIONS
    fits &= not any(name.endswith("experts") for name in found.names.kinds)
    fits &= not dropout or not any("down_proj" in name for name in names)
    fits &= not any(name.endswith(tuple(f"{one}.bias" for one in MLP)) for name in found.names.parameters)
    fits &= not getattr(text, "residual_dropout", 0)  # Seed-OSS applies it inside the MLP
    inside = {name.rpartition(".")[0] for name in names if module_names.short(name) in MLP}
    return Adapted(
        names,
        trained + saved + rows + experts,
        largest,
        dropout,
        columns=dora or kind.peft == "ia3",
        fusable=fits and not unsupported_reason,
        mlps=len(inside) == text.num_hidden_layers,
        allocates=kind.peft == "adalora",
        unknown="" if counted else unknown,
        unsupported_reason=unsupported_reason,
        saved=saved,
        head=head,
        experts=experts,
        fast_experts=_fast_experts(found, ranks),
    )


def _unsupported_reason(kind: str, options: dict[str, Any], rank: int) -> str:
    """Return why an adapter's options keep every layer from running fused; else the empty string.

    `speed.fused_layers.unsupported_reason` applies the same rules to a live layer.
    """
    obstacles = {
        f"PEFT's {kind} has its own forward pass": kind not in FUSED_TYPES,
        f"rank {rank} is larger than {MAX_RANK}": rank > MAX_RANK,
        "lora_bias": options.get("lora_bias"),
        "DoRA with dropout also changes the base layer's input": options.get("use_dora")
        and options.get("lora_dropout"),
    }
    return next((what for what, is_so in obstacles.items() if is_so), "")


def _fast_experts(found: Architecture, ranks: dict[str, int]) -> bool:
    """Return whether stacked experts and all adapted parameters run by `speed.fused_experts`."""
    other = any(not name.endswith(kernel_limits.STACKED) for name in ranks)
    large = max(ranks.values(), default=0) > kernel_limits.MAX_EXPERTS_RANK
    return not (other or large or kernel_limits.experts_unsupported_reason(found.config, found.names.shapes))
