"""Open the base model of a merge: whole numbers, and a head of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.autoconfig.machine_setup import Setup
from finetune.core import run_checks
from finetune.core.errors import Problem, UserError
from finetune.evaluation import reopen
from finetune.export import verify_merge
from finetune.models import base_identity, loading, model_files
from finetune.quantization import stored_weights
from finetune.recipe.schema import Recipe
from finetune.run_folder import comparability
from finetune.run_folder.run_folder import RunFolder


def changes(folder: RunFolder, recipe: Recipe) -> list[str]:
    """Return notes if the base model has changed since the run, or an override stores it in another way."""
    found, now = base_identity.notes(recipe.model, folder), reopen.setup_of(recipe).storage.value
    if was := comparability.other_storage(folder, recipe, now):
        found.append(f"the base model is stored in {now}, but {was}: the weights differ from the run's")
    return found


def check_unchanged(folder: RunFolder, recipe: Recipe, before: list[str]) -> None:
    """Stop if another program has changed the base model since `changes` returned `before` (exit 2)."""
    if changes(folder, recipe) != before:
        raise UserError(
            Problem(
                "the base model changed while finetune read it",
                "model.name",
                where=recipe.model.name,
                fix="run the command again when no other program writes to the folder",
                code="model-files",
            )
        )


def plain_base(recipe: Recipe, setup: Setup) -> PreTrainedModel:
    """Return the base model as it was in training, in fp32. Quantized weights are dequantized."""
    stored: Any = reopen.open_base(recipe)
    if not setup.quantized:
        return stored.float()
    if setup.storage.value == "fp8":
        return stored.dequantize(torch.float32).float()
    from peft.utils.integrations import dequantize_module_weight

    verify_merge.in_fp32(stored)
    plain = unquantized_base(recipe, setup, stored)
    modules = dict(stored.named_modules())
    for name, parameter in plain.named_parameters():
        owner, _, leaf = name.rpartition(".")
        module = modules.get(owner)
        value: Any = dequantize_module_weight(module) if module and leaf == "weight" else None
        if value is not None and is_transposed(module):
            value = value.T
        value = getattr(module, leaf, None) if value is None else value
        if value is None or value.shape != parameter.shape or value.dtype not in FLOATS:
            raise UserError(
                Problem(
                    f"finetune can't dequantize a base model in {setup.storage.value}",
                    found=f"{name}: {value!r:.60}",
                    fix="train again with model.quantization: none",
                    code="merge",
                )
            )
        parameter.data = value.detach().float()
    del stored, modules
    clear_device_cache(garbage_collection=True)
    return plain


def is_transposed(module: object) -> bool:
    """Return whether a quantized layer holds the transposed weight of GPT-2's Conv1D."""
    return issubclass(getattr(module, "source_cls", object), Conv1D)


def unquantized_base(recipe: Recipe, setup: Setup, stored: PreTrainedModel) -> Any:
    """Return a base model in fp32 that can take the weights of `stored`.

    A checkpoint that is already quantized has no fp32 weights, so the model is created without weights.
    """
    config = model_files.read_config(recipe.model)
    if not stored_weights.read(config):
        unquantized = replace(setup, storage=run_checks.Choice("fp32", "to merge into"))
        return loading.load(recipe.model, unquantized, str(stored.device)).eval()
    plain: Any = loading.without_weights(stored_weights.forget(config), torch.float32)
    plain.resize_token_embeddings(stored.get_input_embeddings().num_embeddings, mean_resizing=False)
    plain.generation_config = stored.generation_config
    return plain.to(stored.device)


def unrounded(recipe: Recipe) -> Recipe:
    """Return the recipe without `speed.qat`, because an adapter is merged into unrounded weights."""
    return recipe.model_copy(update={"speed": recipe.speed.model_copy(update={"qat": None})})


def untie(plain: Any) -> bool:
    """Give a tied output head its own weights, so that a merge does not change both.

    Return whether it was tied.
    """
    head, embedding = plain.get_output_embeddings(), plain.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return False
    head.weight = torch.nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    say_tied(plain, False)
    return True


def retie(merged: Any) -> None:
    """Tie the head again, unless training made it different."""
    head, embedding = merged.get_output_embeddings(), merged.get_input_embeddings()
    if torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        say_tied(merged, True)


def say_tied(opened: PreTrainedModel | PeftModel, tied: bool) -> None:
    for config in (opened.config, opened.config.get_text_config()):
        config.tie_word_embeddings = tied


# Dtypes of weights that need no separate scale
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
