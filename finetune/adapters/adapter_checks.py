"""Run checks on an attached adapter: matched modules, counts and trained rows."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any

from finetune.adapters import expert_targets, target_modules, trainable_parameters
from finetune.core.errors import Exit
from finetune.models import module_names
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from peft import PeftModel
    from torch import nn

    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Adapter


def add_new_rows_check(adapted: PeftModel, added: Sequence[int], checks: RunChecks) -> None:
    """Add a run check that the rows of new tokens train in embeddings and head, alone or with all rows."""
    count, heads = (
        _rows_trained(module, added)
        for module in (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    )
    actual = f"{count} embedding rows train" + (f", and {heads} of the head" if heads != count else "")
    checks.add(
        "model.add_tokens",
        expected=f"{len(added)} embedding rows train",
        actual=actual,
        how="rows of the embeddings and of the head with requires_grad",
    )


def _rows_trained(module: nn.Module, added: Sequence[int]) -> int:
    """Count the rows of new tokens that train in embeddings or a head wrapped by PEFT."""
    if rows := getattr(module, "token_adapter", None):
        trained = set(rows.token_indices["default"]) & set(added)
        return len(trained) if rows.trainable_tokens_delta["default"].requires_grad else 0
    whole = getattr(module, "modules_to_save", None)
    return len(added) if whole and whole["default"].weight.requires_grad else 0


def add_run_checks(
    adapted: PeftModel, adapter: Adapter, known: module_names.Names, checks: RunChecks
) -> None:
    """Add run checks of the adapter's type, modules, ranks and other trainable tensors in the model."""
    config, kind = adapted.peft_config["default"], adapter_types.find(adapter.type)
    asked = " ".join([kind.peft.upper(), *(f"with {key}" for key in kind.sets)])
    actual = str(getattr(config.peft_type, "value", config.peft_type))
    actual = " ".join([actual, *(f"with {key}" for key in kind.sets if getattr(config, key, None))])
    checks.add("adapter.type", asked, actual, "the live PEFT config")
    options = adapter.options()
    changed = Counter(module_names.short(name) for name in getattr(adapted, "targeted_module_names", ()))
    limits = vars(config) if adapter.source else {}  # the saved adapter may exclude layers
    resolved = expert_targets.resolve({**limits, **options, **kind.sets}, known, kind.peft)
    if changed:
        targets = options.get("target_modules")
        everything = targets in (target_modules.EVERYTHING, expert_targets.WITH_EXPERTS)
        as_saved = adapter.source and not everything  # the saved adapter names its modules
        expected = Counter(map(module_names.short, resolved.modules))
        expected = changed if targets is None or as_saved else expected
        checks.add(
            "adapter.target_modules", _counts(expected), _counts(changed), "adapted modules, counted by name"
        )
    if kind.peft == "lora" and (options.get("rank_pattern") or options.get("alpha_pattern")):
        _add_pattern_check(adapted, config, checks)
    for key, part in (
        ("modules_to_save", ".modules_to_save."),
        ("trainable_token_indices", "trainable_tokens_delta"),
    ):
        if options.get(key):
            trained = {n for n in trainable_parameters.trainable(adapted) if part in n}
            checks.add(
                f"adapter.{key}",
                options[key],
                f"{len(trained)} tensors train",
                "parameters with requires_grad",
                ok=bool(trained),
            )
    parameters = set(getattr(adapted, "targeted_parameter_names", ()))
    # The names in a saved adapter are PEFT's, so `gate_proj` there names no experts
    of_parameters = limits if adapter.source else resolved.options
    asked_parameters = of_parameters.get("target_parameters")
    if parameters or asked_parameters:
        expected_parameters = set(expert_targets.parameter_ranks(of_parameters, known))
        checks.add(
            "adapter.target_parameters",
            asked_parameters,
            f"{len(parameters)} parameters",
            "the live PEFT model",
            ok=bool(parameters) and parameters == expected_parameters,
        )
    checks.notes += expert_targets.notes({**options, **kind.sets}, known, kind.peft)
    count_trainable(adapted, checks)


def _add_pattern_check(adapted: PeftModel, config: Any, checks: RunChecks) -> None:
    """Record rank and scale of each module, and the values of PEFT's rule for patterns."""
    from peft.utils.other import get_pattern_key

    expected, actual = Counter[str](), Counter[str]()
    for name in adapted.targeted_module_names:
        rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern, name), config.r)
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern, name), config.lora_alpha)
        module: Any = adapted.get_base_model().get_submodule(name)
        expected[f"r={rank} x{alpha / (rank**0.5 if config.use_rslora else rank):g}"] += 1
        actual[f"r={len(module.lora_A['default'].weight)} x{module.scaling['default']:g}"] += 1
    checks.add(
        "adapter.rank_pattern, alpha_pattern",
        expected=_counts(expected),
        actual=_counts(actual),
        how="rows of A and scale, counted over modules",
    )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items()))


def count_trainable(model: torch.nn.Module, checks: RunChecks) -> None:
    from finetune.distributed import sharded_tensors  # imports torch
    from finetune.quantization import stacked_experts

    count = sum(
        sharded_tensors.shape(parameter).numel()
        for parameter in trainable_parameters.trainable(model).values()
    )
    total = sum(sharded_tensors.shape(parameter).numel() for parameter in model.parameters())
    if hasattr(model, "get_nb_trainable_parameters"):  # it counts two weights per byte of a 4-bit tensor
        count, total = model.get_nb_trainable_parameters()  # type: ignore[operator]  (a PeftModel's method)
    total += sum(prod(by.shape) - values.numel() for values, by in stacked_experts.all_of(model))
    checks.add(
        "trainable parameters",
        expected="at least one",
        actual=f"{count:,} of {total:,} ({count / total:.2%})",
        how="parameters with requires_grad",
        ok=count > 0,
        code=Exit.TRAINING,
    )
