"""Train the model of a run, and check what the training changed."""

from __future__ import annotations

from typing import Any

from finetune.adapters import adalora, trainable_parameters
from finetune.distributed import deepspeed_zero, gradient_reduction
from finetune.models import fingerprint
from finetune.training import expert_use, launch_checks, optimizers, stopping, verify_saved
from finetune.training.run_context import RunContext
from finetune.training.trainer import Trainer


def train(run: RunContext, trainer: Trainer) -> None:
    """Train with run checks, and compare the weights before and after training."""
    section, checkpoint, checks = run.recipe.adapter, run.checkpoint, run.checks
    checks.check()
    adapted: Any = trainer.model
    rounded = trainable_parameters.train_in_fp32(adapted) if section.type != "full" else {}
    if deepspeed_zero.used() and section.type != "full":
        deepspeed_zero.cast(adapted, trainer.accelerator.mixed_precision)
    before = verify_saved.fingerprints(adapted)
    if checkpoint:
        trainer.train_from(checkpoint.path, checkpoint.check_unchanged)
    else:
        trainer.train_from(None)
    ended_by = next((one.patience for one in trainer.validations if one.ran_out), None)
    planned, complete = trainer.first_step.plan.steps, trainer.schedule.complete
    stopping.add_steps_check(trainer.state, planned, ended_by, checks, complete=complete)
    launch_checks.add_repeated_check(trainer, checks)
    launch_checks.add_loader_check(trainer, checks)
    if trainer.state.global_step >= trainer.first_step.first:  # a run may resume after its last step
        gradient_reduction.add_run_check(trainer.model_wrapped, trainer.exchanged, checks)
    if trainer.loss.installed:
        tokens, routers = trainer.sums.get(expert_use.TOKENS), trainer.loss.installed.routers
        idle = expert_use.add_check(trainer.accelerator, tokens, routers, checks)
        if idle and trainer.metrics:
            trainer.metrics.screen.say(f"warning: {idle}")
    trainer.loss.remove()  # it holds the model, which is loaded again
    if section.type != "full":
        same = fingerprint.fingerprint(trainable_parameters.frozen(adapted))
        checks.add(
            "base weights after training",
            trainer.contract["base"],
            same,
            "hash of every frozen tensor, before and after",
        )
    verify_saved.add_moved_check(before, adapted, trainer.state.global_step, checks)
    trainer.writer.add_run_check(checks)
    for validation in trainer.validations:
        validation.restore(adapted, trainer.state, checks)
    for name, dtype in rounded.items():
        adapted.get_parameter(name).data = adapted.get_parameter(name).data.to(dtype)
    ratio = section.ours("loraplus_lr_ratio")
    if ratio:
        optimizers.add_loraplus_check(adapted, trainer.optimizer, trainer.args.learning_rate, ratio, checks)
    if trainer.regularizer is not None:
        used, budget = adalora.ranks(adapted)
        checks.add("AdaLoRA ranks", budget, used, "ranks left by the masks, summed over modules")
        adalora.drop_masked_ranks(adapted)
    checks.check()
