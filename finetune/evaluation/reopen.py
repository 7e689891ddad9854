"""Load the base model and the fine-tuned model of a run again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import PartialState
from accelerate.utils import disable_fsdp_ram_efficient_loading
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from finetune.adapters import continue_from
from finetune.autoconfig import attention_choice, machine_setup
from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import Exit, Problem, UserError
from finetune.evaluation import gpu_room
from finetune.models import checked_files, checkpoint_headers, loading, tokenizer_setup
from finetune.quantization import qat, stacked_experts, stored_weights
from finetune.recipe.schema import Model, Recipe
from finetune.run_folder.run_folder import RunFolder
from finetune.speed import fused_experts


def base_stands(tuned: object) -> bool:
    """Return whether disabling the adapter gives the base model. Not if PEFT changed its weights in place."""
    config = getattr(tuned, "peft_config", {}).get("default")
    if config is None or continue_from.is_rebased(config):
        return False
    return getattr(config, "bias", "none") in (None, "none")


def setup_of(recipe: Recipe, section: Model | None = None) -> Setup:
    """Return how this machine loads a run's model.

    The base model has the same storage as in training. The attention supports masks and a cache.
    """
    config = checked_files.read_config(section or recipe.model)
    setup = machine_setup.choose(
        attention=recipe.model.attention,
        base=recipe.model.quantization,
        adapter_type=recipe.adapter.type,
        model=machine_setup.ModelProperties(attention_choice.read(config), stored_weights.read(config)),
    )
    return replace(setup, launch=replace(setup.launch, sharded=""))  # each process loads the whole model


def storage_note(recipe: Recipe) -> list[str]:
    """Return a note if an fp8 base model is loaded on a machine without fp8 GEMMs."""
    value, reason = setup_of(recipe).storage
    stored = f"the base model is stored in {value}: {reason}"
    return [stored] if value == "fp8" and reason != "asked for" else []


def notes(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the notes on the storage of the base model, and on a chat template that is not its own."""
    return [*storage_note(recipe), *tokenizer_setup.foreign_template(recipe.model, tokenizer)]


def open_base(recipe: Recipe, name: str | None = None) -> PreTrainedModel:
    """Load the base model of a recipe as in training.

    Args:
        name: other weights to load in the same way.
    """
    section = (
        recipe.model
        if name is None
        else recipe.model.model_copy(update={"name": name, "revision": None, "add_tokens": []})
    )
    setup = setup_of(recipe, section)
    state, device = PartialState(cpu=setup.hardware.device == "cpu"), "auto"
    if not gpu_room.too_large(section, setup):
        device = str(state.device)
    elif state.num_processes > 1:
        raise UserError(
            Problem(
                "the base model does not fit on one GPU",
                "model.name",
                found=section.name,
                fix="run `finetune evaluate` without a launcher, so that one process uses all GPUs",
                code="out-of-memory",
            ),
            code=Exit.ENVIRONMENT,
        )
    disable_fsdp_ram_efficient_loading()  # otherwise all processes except one would get empty weights
    unset_hf_deepspeed_config()  # otherwise ZeRO-3 would shard a model without an engine
    return qat.prepare(loading.load(section, setup, device).eval(), recipe.speed.qat).eval()


def reopen(folder: RunFolder, recipe: Recipe) -> PreTrainedModel:
    """Load the fine-tuned model from disk: the base model as in training, and the adapter with plain PEFT.

    Raises:
        UserError: the saved files cannot be loaded (exit 4).
    """
    fix = "restore the folder from a copy, or train again"
    refused = continue_from.refusals(
        "finetune can't load the saved weights", Exit.ARTIFACT, key="", where=str(folder.weights), fix=fix
    )
    if folder.weights == folder.model:
        with refused:
            full = open_base(recipe, str(folder.model))
        folder.check_weights()
        continue_from.check_finite(dict(full.named_parameters()), str(folder.model))
        return full
    from peft import PeftModel

    saved = checkpoint_headers.stored(folder.adapter)  # before the base model, which takes longer
    if wrong := checkpoint_headers.adapter_problems(saved):
        found = (replace(one, key="", where=str(folder.adapter), fix=fix) for one in wrong)
        raise UserError(*found, code=Exit.ARTIFACT)
    continue_from.check_config(folder.adapter)
    base: Any = open_base(recipe)
    continue_from.check_patterns(folder.adapter, base)
    with refused, loading.ONE_AT_A_TIME, stacked_experts.plain_parameters(base):
        tuned: Any = PeftModel.from_pretrained(base, str(folder.adapter))
    folder.check_weights()  # once more: another program may have replaced a file meanwhile
    continue_from.check_whole(tuned, list(saved), str(folder.adapter))
    fused_experts.install_quantized(tuned)
    fused_experts.choose_fp8(tuned, recipe.speed.fp8_experts)
    return qat.follow(tuned).eval()


def tokenizer_of(folder: RunFolder) -> PreTrainedTokenizerBase:
    """Load the tokenizer that is saved with the weights."""
    return tokenizer_setup.load_tokenizer(Model(name=str(folder.weights)))
