"""Build the Trainer of a run, with all its parts."""

from __future__ import annotations

from collections.abc import Sequence

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from finetune.adapters import adalora
from finetune.checkpointing.checkpoints import Writer
from finetune.recipe.schema import Speed
from finetune.speed import dora_norm, lm_head_loss
from finetune.training import (
    batch_setup,
    eval_callback,
    first_step_checks,
    nan_detection,
    optimizers,
    step_metrics,
    stopping,
)
from finetune.training.run_context import RunContext, RunData, StepPlan
from finetune.training.stopping import Stop
from finetune.training.trainer import Trainer
from finetune.training.trainer_parts import TrainerParts


def build(
    run: RunContext,
    data: RunData,
    adapted: PreTrainedModel | PeftModel,
    plan: StepPlan,
    stop: Stop,
    callbacks: Sequence[TrainerCallback],
) -> Trainer:
    """Build the Trainer of a run.

    Args:
        stop: ends the run before its last step.
        callbacks: callbacks of the caller.
    """
    recipe, setup, checks, dataset = run.recipe, run.setup, run.checks, data.prepared.train
    loss = lm_head_loss.HeadLoss(plan.choices["speed.loss"].value, compiled=plan.is_on("speed.compile"))
    optimizer = optimizers.choose(data.arguments, adapted, recipe.adapter, recipe.speed)
    micro_batches = batch_setup.micro_batches(run, plan)
    first_step = first_step_checks.FirstStep(run, plan, loss, optimizer, micro_batches)
    metrics = step_metrics.Metrics(
        run.folder, run.console, setup, batch=plan.batch.effective, flops_per_token=plan.flops_per_token
    )
    validations = eval_callback.validation_callbacks(recipe, data.tokenizer, adapted, metrics)
    writer = Writer(run.folder.checkpoints, recipe.train.save_total_limit)
    schedule = stopping.Schedule(recipe.train, stop, writer, setup.launch.keeper)
    unusable = nan_detection.callbacks(
        recipe.train, setup.launch.precision, run.folder, run.console, run.checks
    )
    parts = TrainerParts(
        callbacks=[
            first_step,
            *unusable,
            metrics,
            *validations,
            *callbacks,
            schedule,  # the last that can end the training, so it knows who did
            *dora_norm.refreshing(adapted, checks),
            *step_callbacks(recipe.speed, adapted),
        ],
        first_step=first_step,
        micro_batches=micro_batches,
        loss=loss,
        optimizer=optimizer,
        schedule=schedule,
        metrics=metrics,
        nonfinite=next((one for one in unusable if isinstance(one, nan_detection.NonFinite)), None),
        validations=validations,
        contract=plan.contract,
        in_checkpoints=(schedule, micro_batches, metrics, *unusable, *validations),
        corrector=None if run.checkpoint else batch_setup.corrector(run, adapted, plan),
        regularizer=adalora.regularizer(adapted, recipe.adapter.ours("orth_reg_every") or 1),
        fixed_shape=batch_setup.fixed_shape(recipe.data, dataset, plan),
        loader_timeout=recipe.train.dataloader_timeout,
    )
    return Trainer(adapted, data.arguments, dataset, data.tokenizer, parts)


def step_callbacks(speed: Speed, adapted: nn.Module) -> list[TrainerCallback]:
    """Return the callbacks of an optimizer step: AdaLoRA's allocation, and gradients for offloading."""
    allocates = [adalora.AllocateRanks()] if adalora.allocates(adapted) else []
    offloaded = speed.offload in ("optimizer", "all")
    return [*allocates, *([optimizers.SendGradients()] if offloaded else [])]
