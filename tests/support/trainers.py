"""Trainers on small models and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, set_seed
from trl.trainer.sft_config import SFTConfig

from finetune.adapters import adalora, attach
from finetune.adapters.adalora import AllocateRanks
from finetune.autoconfig import batch_size, machine_setup
from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing.checkpoints import Writer
from finetune.core.console import Console
from finetune.core.run_checks import RunChecks
from finetune.models import loading, tokenizer_setup
from finetune.recipe import loader
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder
from finetune.speed.lm_head_loss import HeadLoss
from finetune.training import first_step_checks, optimizers, stopping, training_arguments, training_data
from finetune.training.nan_detection import NonFinite
from finetune.training.oom_recovery import MicroBatches
from finetune.training.run_context import RunContext, StepPlan
from finetune.training.step_metrics import Metrics
from finetune.training.trainer import Trainer
from finetune.training.trainer_parts import TrainerParts
from support.paths import QUICKSTART

SIZE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# The operations of each model on its logits after the output head
FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {},
    "qwen3": {"head_dim": 8},
    "phi": {},  # a bias
    "phi3": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 8},
    "gemma3": {"head_dim": 8},  # reads what its backbone says of images
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8},  # and of keys that layers share
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
    "recurrent_gemma": {"logits_soft_cap": 3.0, "head_dim": 8},
}


def given(family: str) -> dict[str, Any]:
    sizes = {**SIZE, **FAMILIES[family]}
    if family != "gemma3":
        return sizes
    sees = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees |= {"image_size": 28, "patch_size": 14}
    marks = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
    return {"text_config": sizes, "vision_config": sees, "mm_tokens_per_image": 4, **marks}


def opened(base: Path, *overrides: str):
    """The model of that folder with the quickstart's adapter and SFTConfig, and the recipe."""
    short = [f"model.name={base}", "train.effective_batch_size=8", "train.max_steps=2"]
    loaded = loader.load(QUICKSTART, [*short, *overrides])
    kind = loaded.adapter.type
    setup = machine_setup.choose(attention=loaded.model.attention, base="auto", adapter_type=kind)
    batch = batch_size.split_batch(loaded.train, 1)
    arguments = training_arguments.training_arguments(loaded.train, loaded.data, setup, batch)
    loaded_base = loading.load(loaded.model, setup, str(arguments.device))
    set_seed(loaded.train.seed)
    added = tokenizer_setup.added_tokens(loaded.model, tokenizer_setup.load_tokenizer(loaded.model))
    adapted = attach.attach(loaded_base, loaded.adapter, arguments.max_steps, RunChecks(), added=added)
    return adapted, arguments, loaded, setup


def run_context(
    recipe: Recipe, setup: Setup, checks: RunChecks | None = None, found: Any = None
) -> RunContext:
    """The context of a quiet run of this recipe."""
    folder = RunFolder(Path(recipe.train.output_dir or "run"))
    return RunContext(recipe, setup, RunChecks(), Console(quiet=True), folder, found)


def trainer_parts(
    adapted: Any,
    arguments: SFTConfig,
    recipe: Recipe,
    setup: Setup,
    *callbacks: TrainerCallback,
    loss: str = "trl",
) -> TrainerParts:
    """The parts of a trainer that checks its first step, with a schedule that nothing stops."""
    head_loss, optimizer = HeadLoss(loss), optimizers.choose(arguments, adapted, recipe.adapter, recipe.speed)
    batches = MicroBatches(arguments.per_device_train_batch_size)
    plan = StepPlan(batch_size.split_batch(recipe.train, 1), arguments.max_steps, {})
    first_step = first_step_checks.FirstStep(run_context(recipe, setup), plan, head_loss, optimizer, batches)
    writer = Writer(Path(arguments.output_dir or "run") / "checkpoints", None)
    return TrainerParts(
        callbacks=[first_step, *callbacks, *([AllocateRanks()] if adalora.allocates(adapted) else [])],
        first_step=first_step,
        micro_batches=batches,
        loss=head_loss,
        optimizer=optimizer,
        schedule=stopping.Schedule(recipe.train, stopping.Stop(), writer, ""),
        metrics=next((one for one in callbacks if isinstance(one, Metrics)), None),
        nonfinite=next((one for one in callbacks if isinstance(one, NonFinite)), None),
        regularizer=adalora.regularizer(adapted, recipe.adapter.ours("orth_reg_every") or 1),
    )


def trainer_of(base: Path, folder: Path, chosen: str, *overrides: str):
    """The trainer of a run on 96 rows, not yet trained."""
    adapted, arguments, loaded, setup = opened(base, "data.validation=null", *overrides)
    arguments.output_dir = str(folder)
    tokenizer, prepared = training_data.prepare_in_turn(loaded, setup)
    parts = trainer_parts(adapted, arguments, loaded, setup, loss=chosen)
    return Trainer(adapted, arguments, prepared.train, tokenizer, parts)
