"""Add an adapter to a model, or continue from one. Then record its modules and the trainable weights.

`recipe/adapter_types.py` has the types and their keys. `initialization.py` has initializations that read
data.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from finetune.adapters import (
    adapter_checks,
    continue_from,
    expert_targets,
    initialization,
    name_problems,
    target_modules,
    trainable_parameters,
)
from finetune.core import upstream_private
from finetune.core.errors import Problem, UserError
from finetune.models import module_names
from finetune.quantization import qat
from finetune.recipe import adapter_types
from finetune.recipe.adapter_rules import coded, rows_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

    from finetune.core.run_checks import RunChecks
    from finetune.recipe.adapter_types import Shapes
    from finetune.recipe.schema import Adapter


def attach(
    model: PreTrainedModel,
    adapter: Adapter,
    steps: int,
    ledger: RunChecks,
    batches: Callable[[], list[dict[str, torch.Tensor]]] = list,
    added: Sequence[int] = (),
) -> PeftModel | PreTrainedModel:
    """Attach the adapter to the model. `full` trains the model itself.

    Args:
        steps: optimizer steps of the whole run, for AdaLoRA's schedule.
        batches: gives batches of training data, for initializations that read data.
        added: ids of tokens that are new to the model. Their rows train.

    Raises:
        UserError: a name matches no module, or PEFT refuses the options (exit 2).
    """
    from finetune.quantization import fp8_loading

    if adapter.type == "full":
        ledger.add("adapter.type", "full", "full", "no adapter: every parameter trains")
        _freeze_towers(model, ledger)
        adapter_checks.count_trainable(model, ledger)
        return model
    everything = module_names.of_model(model)
    if adapter.source:
        adapted: Any = continue_from.load(model, adapter, added, ledger)
    else:
        _check_names(model, adapter, everything)
        with continue_from.refusals("PEFT refuses it"):
            config: Any = peft_config(adapter, steps, trainable_parameters.shapes(model), everything)
        _train_rows(config, everything, added)
        _keep_to_text(model, config, everything)
        _fit_to_layers(model, config, everything)
        if adapter_types.find(adapter.type).prompt:
            _fit_to_width(model, config)
        if getattr(config, "tokenizer_name_or_path", None):
            config.tokenizer_name_or_path = str(model.name_or_path)  # PEFT opens it
        init = adapter.options().get("init_lora_weights")
        with continue_from.refusals("PEFT refuses it"):
            adapted = initialization.attach(model, config, init, everything.linear, batches, ledger)
    _settle(adapted, adapter, model)
    fp8_loading.refuse_merges(adapted)
    _freeze_towers(model, ledger)
    adapter_checks.add_receipts(adapted, adapter, everything, ledger)
    if added:
        adapter_checks.add_row_receipt(adapted, added, ledger)
    return qat.follow(adapted)


def _settle(adapted: PeftModel, adapter: Adapter, model: PreTrainedModel) -> None:
    """Name the base model in the config, freeze tensors that PEFT trains by mistake, and let TRL find the
    head.

    Raises:
        UserError: the head has an adapter, which TRL's loss ignores (exit 2).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    config: Any = adapted.peft_config["default"]
    config.base_model_name_or_path = str(model.name_or_path)
    config.revision = upstream_private.commit_hash(model.config)
    for name, parameter in adapted.named_parameters():
        if ".ranknum." in name:  # not saved, and trainable on a bf16 base
            parameter.requires_grad = False
    head = adapted.get_output_embeddings()
    if isinstance(head, BaseTunerLayer):
        raise UserError(name_problems.adapter_on_head(adapter.type))
    if not hasattr(head, "bias"):  # TRL reads it, and PEFT's wrapper for trained tokens lacks it
        head.register_parameter("bias", None)


def _keep_to_text(model: PreTrainedModel, config: PreTrainedConfig, known: module_names.Names) -> None:
    """Exclude a multimodal model's encoders, whose layers may have the names of the text model's layers."""
    if not trainable_parameters.towers(model):
        return
    decoder = model.get_decoder()
    text = next(name for name, module in model.named_modules() if module is decoder)
    if hasattr(config, "exclude_modules"):
        own = config.exclude_modules or ()
        own = [own] if isinstance(own, str) else [rf"(.*\.)?{re.escape(name)}" for name in sorted(own)]
        config.exclude_modules = "|".join([rf"(?!{re.escape(text)}\.).*", *own])
    elif getattr(config, "target_modules", None):
        config.target_modules = set(target_modules.targeted(vars(config), known))


def _fit_to_layers(model: PreTrainedModel, config: PreTrainedConfig, known: module_names.Names) -> None:
    """Tell PEFT how GPT-2's layers are stored, and limit "all-linear" to layers that return one tensor."""
    from torch import nn

    options = vars(config)
    picked = target_modules.targeted(options, known)
    if hasattr(config, "fan_in_fan_out") and any(known.kinds[name] == "Conv1D" for name in picked):
        config.fan_in_fan_out = True  # otherwise PEFT sets it with a warning
    if options.get("target_modules") != target_modules.EVERYTHING:
        return
    linear = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and n != known.head]
    if any(known.kinds.get(name, "Linear") not in module_names.LINEAR for name in linear):
        config.target_modules = set(known.linear)


def _fit_to_width(model: PreTrainedModel, config: PeftConfig) -> None:
    """Return the sizes of virtual tokens. PEFT reads them by names that many configs lack."""
    text: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    sizes = {
        "num_layers": text.num_hidden_layers,
        "token_dim": embedding.weight.shape[1],
        "num_attention_heads": getattr(text, "num_attention_heads", None)
        or 1,  # only adapters with past keys use the heads
    }
    for key, size in sizes.items():
        if getattr(config, key, None) is None:
            setattr(config, key, size)


def _freeze_towers(model: PreTrainedModel, ledger: RunChecks) -> None:
    """Freeze trainable weights outside of the text model."""
    from torch import nn

    held = trainable_parameters.towers(model)
    if not held:
        return
    for parameter in held.values():
        parameter.requires_grad = False
    text = set(module_names.of_text(model))
    count = sum(isinstance(module, nn.Linear) and module not in text for module in model.modules())
    beside = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in held}))
    ledger.notes.append(
        f"{count} linear layers get no adapter, because the model does not use them: {beside}"
    )
    trained = sum(parameter.requires_grad for parameter in trainable_parameters.towers(model).values())
    how = "parameters with requires_grad outside of the text model and its head"
    ledger.add(f"trained in {beside}", "nothing", trained or "nothing", how)


def peft_config(
    adapter: Adapter, steps: int, model: Shapes, names: module_names.Names | None = None
) -> PeftConfig:
    """Build PEFT's config from the recipe's section, completed for this model and this run.

    Raises:
        UserError: with these options, the adapter would change nothing (exit 2).
    """
    from peft import TaskType
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = adapter_types.find(adapter.type)
    options: dict[str, Any] = {**deepcopy(adapter.options()), **kind.sets}  # PEFT adds to lists of its config
    family = names.family if names else ""
    if names and options.get("target_modules") is not None:
        options = expert_targets.resolve(options, names, kind.peft).options
    if options.get("target_modules") == "all-linear" and options.get("layers_to_transform") is not None:
        options["target_modules"] = sorted(set(map(module_names.short, model)))  # PEFT wants a list beside it
    if kind.build:
        options = kind.build(options, steps, model, family)
    if options.get("trainable_token_indices") in ([], {}):  # PEFT would create an empty tensor
        del options["trainable_token_indices"]
    init = options.get("init_lora_weights")
    if init in adapter_types.CONFIGURED_INITS:
        options.setdefault(f"{init}_config", {})  # otherwise PEFT warns that it uses the defaults
    if init == "loftq":  # PEFT's own LoftQ would quantize the weights again
        options["init_lora_weights"] = True
    classes = {str(name.value).lower(): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    return classes[kind.peft](task_type=TaskType.CAUSAL_LM, **options)


def derived(model: Any, adapter: Adapter) -> dict[str, Any]:
    """Return PEFT's keys that finetune sets: AdaLoRA's schedule and IA3's feed-forward modules."""
    builds = () if adapter.source else adapter_types.find(adapter.type).builds
    values = {
        key: getattr(model.peft_config["default"], key) for key in builds if key not in adapter.options()
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def _check_names(model: PreTrainedModel, adapter: Adapter, known: module_names.Names) -> None:
    """Refuse names and numbers of the recipe that match nothing in the model, all in one error."""
    kind = adapter_types.find(adapter.type)
    options = {**adapter.options(), **kind.sets}
    problems = name_problems.problems(options, known, kind.peft)
    parts = list(model.named_modules())
    for name in options.get("modules_to_save") or ():
        held = {module_names.stored_as(part) for at, part in parts if at.endswith(name)} - {""}
        found = coded([name], held.pop(), adapter.type if kind.storage else "") if held else []
        problems += [_conflict(what, key, **texts) for key, what, texts in found]
    if problems:
        raise UserError(*problems)


def _conflict(what: str, key: str, code: str = "recipe-conflict", **texts: str) -> Problem:
    return Problem(what, key, code=code, **texts)


def _train_rows(config: PreTrainedConfig, known: module_names.Names, added: Sequence[int]) -> None:
    """Make the rows of new tokens trainable in the embeddings, and in the head if it has its own.

    Raises:
        UserError: only one of embeddings and head trains as a whole (exit 2).
    """
    tied, embedding, head = known.tied, module_names.short(known.embedding), module_names.short(known.head)
    if found := rows_beside(vars(config), tied, bool(added), embedding, head):
        raise UserError(*(_conflict(what, key, **texts) for key, what, texts in found))
    saved = getattr(config, "modules_to_save", None) or ()  # trainable_tokens has no such key
    if not added or embedding in map(module_names.short, saved):
        return
    own = getattr(config, "trainable_token_indices", None) or []
    asked = own if isinstance(own, dict) else {embedding: own} | ({} if tied else {head: own})
    rows = {name: sorted({*ids, *added}) for name, ids in asked.items()}
    config.trainable_token_indices = next(iter(rows.values())) if tied and len(rows) == 1 else rows
