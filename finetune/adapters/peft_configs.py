"""Build PEFT's config from the `adapter` section of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from finetune.adapters import expert_targets, target_modules, trainable_parameters
from finetune.core.errors import raise_if_any
from finetune.models import module_names
from finetune.recipe import adapter_types
from finetune.recipe.adapter_rules import rows_beside

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.adapter_types import Shapes
    from finetune.recipe.schema import Adapter


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
    # A copy, because PEFT appends to lists of its config
    options: dict[str, Any] = {**deepcopy(adapter.options()), **kind.sets}
    family = names.family if names else ""
    if names and options.get("target_modules") is not None:
        options = expert_targets.resolve(options, names, kind.peft).options
    if options.get("target_modules") == "all-linear" and options.get("layers_to_transform") is not None:
        # PEFT needs a list here
        options["target_modules"] = sorted(set(map(module_names.short, model)))
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


def derived(model: PreTrainedModel | PeftModel, adapter: Adapter) -> dict[str, Any]:
    """Return PEFT's keys that finetune sets: AdaLoRA's schedule and IA3's feed-forward modules."""
    builds = () if adapter.source else adapter_types.find(adapter.type).builds
    values = {
        key: getattr(model.peft_config["default"], key) for key in builds if key not in adapter.options()
    }
    return {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}


def fit(config: Any, model: PreTrainedModel, known: module_names.Names, added: Sequence[int]) -> None:
    """Complete PEFT's config with facts about the model.

    Args:
        config: PEFT's config, which this function changes.
        added: ids of new tokens. Their embeddings train.

    Raises:
        UserError: `modules_to_save` names the embeddings without the head, or the head without the
            embeddings (exit 2).
    """
    _train_rows(config, known, added)
    _keep_to_text(model, config, known)
    _fit_to_layers(model, config, known)
    if config.is_prompt_learning:
        _fit_to_width(model, config)
    if getattr(config, "tokenizer_name_or_path", None):
        config.tokenizer_name_or_path = str(model.name_or_path)  # PEFT opens it


def _train_rows(config: ModelConfig, known: module_names.Names, added: Sequence[int]) -> None:
    """Make the embeddings of new tokens trainable, and their rows of the head if the head is not tied.

    Raises:
        UserError: `modules_to_save` names the embeddings without the head, or the head without the
            embeddings (exit 2).
    """
    tied, embedding, head = known.tied, module_names.short(known.embedding), module_names.short(known.head)
    raise_if_any(rows_beside(vars(config), tied, bool(added), embedding, head))
    saved = getattr(config, "modules_to_save", None) or ()  # trainable_tokens has no such key
    if not added or embedding in map(module_names.short, saved):
        return
    own = getattr(config, "trainable_token_indices", None) or []
    token_rows = own if isinstance(own, dict) else {embedding: own} | ({} if tied else {head: own})
    rows = {name: sorted({*ids, *added}) for name, ids in token_rows.items()}
    config.trainable_token_indices = next(iter(rows.values())) if tied and len(rows) == 1 else rows


def _keep_to_text(model: PreTrainedModel, config: ModelConfig, known: module_names.Names) -> None:
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


def _fit_to_layers(model: PreTrainedModel, config: ModelConfig, known: module_names.Names) -> None:
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
    """Set the sizes of virtual tokens. PEFT reads them by names that many configs lack."""
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
