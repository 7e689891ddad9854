"""One small function for each adapter type -> PEFT's config; `attach` puts it on the model and counts.

To add a type: a function here with its entries in `BUILDERS` and `USUAL_LEARNING_RATE`, and an entry in
`recipe.ADAPTERS` (one that means a 4-bit base: in `hardware.FOUR_BIT` too).
"""

from __future__ import annotations

import re
from collections import Counter
from math import ceil
from typing import TYPE_CHECKING, Any

from finetune import modules
from finetune.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from finetune.receipts import Ledger
    from finetune.sections import Adapter

# Peak learning rates that usually work; a recipe outside gets one line of advice, never a change.
USUAL_LEARNING_RATE = {
    "lora": (1e-5, 1e-2),
    "qlora": (1e-5, 1e-2),
    "dora": (1e-5, 1e-2),
    "qdora": (1e-5, 1e-2),
    "adalora": (1e-4, 3e-2),
    "ia3": (1e-3, 1e-1),
    "full": (1e-6, 1e-3),
}


def lora(options: dict[str, Any], steps: int, linear: list[str]) -> PeftConfig:
    """LoRA (arXiv 2106.09685)."""
    from peft import LoraConfig, TaskType

    return LoraConfig(task_type=TaskType.CAUSAL_LM, **options)


def dora(options: dict[str, Any], steps: int, linear: list[str]) -> PeftConfig:
    """DoRA (arXiv 2402.09353): LoRA with a trained magnitude for each output."""
    return lora({**options, "use_dora": True}, steps, linear)


def adalora(options: dict[str, Any], steps: int, linear: list[str]) -> PeftConfig:
    """AdaLoRA (arXiv 2303.10512). The schedule comes from the run: a tenth of the steps before ranks are
    taken away, a third of them after the budget is reached."""
    from peft import AdaLoraConfig, TaskType

    options = dict(options)
    rank = options.pop("r")
    options.setdefault("target_r", rank)
    options.setdefault("init_r", ceil(1.5 * options["target_r"]))
    options.setdefault("tinit", steps // 10)
    options.setdefault("tfinal", steps // 3)
    if options["init_r"] <= options["target_r"]:
        found = f"init_r: {options['init_r']}, target_r: {options['target_r']}"
        problem = Problem("AdaLoRA starts with more ranks than it ends with", "adapter.init_r", found=found)
        raise UserError(problem)
    if steps < 2 or options["tinit"] + options["tfinal"] >= steps - 1:
        found = f"tinit {options['tinit']} + tfinal {options['tfinal']}, with {steps} steps"
        what = "no step is left in which AdaLoRA could allocate ranks"
        raise UserError(Problem(what, "adapter.tinit", found=found, expected="tinit + tfinal < steps - 1"))
    return AdaLoraConfig(task_type=TaskType.CAUSAL_LM, total_step=steps, **options)


def ia3(options: dict[str, Any], steps: int, linear: list[str]) -> PeftConfig:
    """(IA)^3 (arXiv 2205.05638): a trained scale for keys, values and the feed-forward's input.

    "all-linear" is spelt out: PEFT would save it as full names, of which `feedforward_modules` is no subset,
    and then refuse to load what it saved.
    """
    from peft import IA3Config, TaskType

    options = dict(options)
    if options.get("target_modules") == "all-linear":
        options["target_modules"] = sorted(set(map(modules.short, linear)))
    if isinstance(options.get("target_modules"), list):
        options.setdefault(
            "feedforward_modules", [n for n in options["target_modules"] if modules.short(n) == "down_proj"]
        )
    return IA3Config(task_type=TaskType.CAUSAL_LM, **options)


BUILDERS = {
    "lora": lora,
    "qlora": lora,
    "dora": dora,
    "qdora": dora,
    "adalora": adalora,
    "ia3": ia3,
}


def attach(
    model: PreTrainedModel, adapter: Adapter, steps: int, ledger: Ledger
) -> PeftModel | PreTrainedModel:
    """Put the adapter on the model. `full` trains the model as it is.

    Args:
        steps: optimizer steps of the whole run; AdaLoRA's schedule is made from it.

    Raises:
        UserError: a target that matches no layer, with the nearest name (exit 2).
    """
    from peft import get_peft_model

    if adapter.type == "full":
        ledger.add("adapter.type", "full", "full", "no adapter: every parameter trains")
        _count_trainable(model, ledger)
        return model
    options = adapter.options()
    targets = options.get("target_modules")
    linear = linear_layers(model)
    problems = [] if targets is None else modules.unmatched(targets, linear)
    for key in ("exclude_modules", "rank_pattern", "alpha_pattern"):  # a typo here would change nothing
        problems += modules.unmatched(list(options.get(key) or ()), linear, key)
    if problems:
        raise UserError(*problems)
    try:
        config = BUILDERS[adapter.type](options, steps, linear)
        adapted = get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise UserError(Problem("PEFT refuses it", "adapter", found=" ".join(str(error).split()))) from error
    for name, parameter in adapted.named_parameters():
        if ".ranknum." in name:  # PEFT does not save it, and on a bf16 base leaves it trainable
            parameter.requires_grad = False
    got = Counter(modules.short(name) for name in adapted.targeted_module_names)
    asked = _expected(options, linear) if targets is not None else got
    ledger.add(
        "adapter.type",
        _peft_type(config),
        _peft_type(adapted.peft_config["default"]),
        "the live PEFT config",
    )
    ledger.add("adapter.target_modules", _counts(asked), _counts(got), "adapted modules, counted by name")
    _count_trainable(adapted, ledger)
    return adapted


def derived(model: Any, adapter: Adapter) -> dict[str, Any]:
    """PEFT keys that a builder set, not the recipe: AdaLoRA's schedule, IA3's feed-forward modules."""
    if adapter.type not in ("adalora", "ia3"):
        return {}
    config = model.peft_config["default"]
    keys = {"adalora": ("target_r", "init_r", "tinit", "tfinal"), "ia3": ("feedforward_modules",)}[
        adapter.type
    ]
    values = {key: getattr(config, key) for key in keys if key not in adapter.options()}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Full names of the linear layers, without the output head."""
    from torch import nn

    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head
    ]


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters that the optimizer will move, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that must be the same after training: frozen parameters and buffers.

    AdaLoRA's `ranknum` is bookkeeping of the adapter, not of the base.
    """
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors.update(model.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if "ranknum" not in name}


def learning_rate_advice(kind: str, rate: float) -> str:
    """One line if the rate is outside what usually works for this type, else the empty string."""
    low, high = USUAL_LEARNING_RATE[kind]
    if low <= rate <= high:
        return ""
    return f"learning_rate {rate:g} is outside the usual {low:g} to {high:g} for {kind}; it is used as it is"


def _expected(options: dict[str, Any], linear: list[str]) -> Counter[str]:
    """The layers that PEFT's rules pick, counted by name: targets, less exclusions, in the layers named."""
    targets, excluded = options["target_modules"], options.get("exclude_modules") or []
    layers = options.get("layers_to_transform")
    wanted = None if layers is None else {layers} if isinstance(layers, int) else set(layers)

    def picked(name: str) -> bool:
        if not any(modules.match(targets, [name]).values()):
            return False
        if any(modules.match(excluded, [name]).values()):
            return False
        number = re.search(r"\.(\d+)\.", name)
        return wanted is None or (number is not None and int(number[1]) in wanted)

    return Counter(modules.short(name) for name in linear if picked(name))


def _peft_type(config: PeftConfig) -> str:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    return f"{kind} with DoRA" if getattr(config, "use_dora", False) else kind


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def _count_trainable(model: torch.nn.Module, ledger: Ledger) -> None:
    count = sum(parameter.numel() for parameter in trainable(model).values())
    total = sum(parameter.numel() for parameter in model.parameters())
    share = f"{count:,} of {total:,} ({count / total:.2%})"
    how = "parameters with requires_grad"
    ledger.add("trainable parameters", "> 0", share, how, ok=count > 0, code=Exit.TRAINING)
