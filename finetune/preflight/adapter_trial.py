"""Attach an adapter to a model without weights, for options that only PEFT can check.

finetune checks the options of common types itself, without torch. PEFT checks other options late, such as a
block size against the width of each layer, or an input in the first forward pass.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from finetune.autoconfig import loss_support
from finetune.core.errors import Problem, UserError
from finetune.models import module_lists, tokenizer_setup
from finetune.recipe import adapter_types
from finetune.recipe.schema import Model, Recipe

# Types and options that `name_problems` and the schema check in full
_CHECKED_TYPES = frozenset({"lora", "adalora", "ia3", "ln_tuning", "prompt_tuning", "p_tuning"})
_CHECKED = frozenset(
    {
        "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save",
        "layers_to_transform", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "bias",
        "trainable_token_indices", "target_parameters", "tinit", "tfinal", "deltaT", "beta1", "beta2",
        "orth_reg_weight", "feedforward_modules", "num_virtual_tokens", "ensure_weight_tying", "lora_bias",
        "init_ia3_weights",
    }
)  # fmt: skip
_ROWS = ("modules_to_save", "trainable_token_indices")  # options that train embeddings and the output head
STEPS = 1000  # steps of AdaLoRA's schedule if the recipe does not set `train.max_steps`


def is_needed(recipe: Recipe) -> bool:
    """Return whether the adapter has a type or an option that finetune does not check itself.

    A local adapter to continue from has tensors, which PEFT compares with the model.
    """
    kind, options = adapter_types.find(recipe.adapter.type), recipe.adapter.options()
    if recipe.adapter.source:
        return Path(recipe.adapter.source).exists()
    if not kind.peft or options.get("init_lora_weights") in adapter_types.PREPARED_INITS:
        return False
    trains_rows = recipe.model.add_tokens or any(options.get(key) for key in _ROWS)
    if trains_rows and recipe.speed.loss in loss_support.CHUNKED:  # PEFT may wrap the output head
        return True
    unset = any(value is None and key.endswith("_pattern") for key, value in options.items())
    other_norms = kind.peft == "ln_tuning" and options.get("target_modules") is not None
    return kind.peft not in _CHECKED_TYPES or not options.keys() <= _CHECKED or unset or other_norms


def check_on_meta(recipe: Recipe, folder: Path) -> list[Problem] | None:
    """Return the problems that PEFT or a forward pass finds; `None` if PEFT needs the weights for its checks.

    Args:
        folder: the folder of the base model.
    """
    logging.disable(logging.WARNING)  # also of packages that PEFT imports
    try:
        return _tried(recipe, folder)
    finally:
        logging.disable(logging.NOTSET)


def _tried(recipe: Recipe, folder: Path) -> list[Problem] | None:
    import torch

    from finetune.adapters import attach
    from finetune.core.run_checks import RunChecks
    from finetune.models import meta_forward
    from finetune.preflight import gradient_probe
    from finetune.speed import lm_head_loss

    steps = recipe.train.max_steps or STEPS
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # PEFT repeats its warnings when training attaches the adapter
            model: Any = module_lists.build_without_weights(folder)
            added = _add_rows(model, recipe.model)
            inputs = meta_forward.inputs(model)
            adapted = attach.attach(model, recipe.adapter, steps, RunChecks(), added=added)
            if recipe.speed.loss in loss_support.CHUNKED:
                base = lm_head_loss.base_model_of(adapted)
                if reason := lm_head_loss.wrapped_reason(base):
                    return [loss_support.refusal(recipe.speed.loss, reason)]
            # `check_layout` finds what would not train of a saved adapter
            if recipe.adapter.source or not inputs:
                return []
            return gradient_probe.problems_on_meta(adapted, recipe.adapter, inputs)
    except UserError as error:
        return None if gradient_probe.needs_values(error.__cause__) else list(error.problems)
    except (RuntimeError, TypeError) as error:  # a check of the adapter has read a value
        if gradient_probe.needs_values(error):
            return None
        raise


def _add_rows(model: Any, section: Model) -> list[int]:
    """Add rows for `model.add_tokens` to the embedding of a model without weights, and return their ids."""
    if not section.add_tokens:
        return []
    added = tokenizer_setup.read_added_tokens(section)
    if added is None:
        added = tokenizer_setup.added_tokens(section, tokenizer_setup.load_tokenizer(section))
    rows = max(len(model.get_input_embeddings().weight), max(added) + 1)
    model.resize_token_embeddings(rows, mean_resizing=False)
    return added
