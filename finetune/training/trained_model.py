"""Train the model of a run, and check what the training changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.adapters import adalora, trainable_parameters
from finetune.core.run_checks import RunChecks
from finetune.distributed import deepspeed_zero, gradient_reduction
from finetune.models import fingerprint
from finetune.training import expert_use, launch_checks, optimizers, stopping, verify_saved

if TYPE_CHECKING:
    from finetune.checkpointing.checkpoints import Found
    from finetune.recipe.schema import Adapter
    from finetune.training.trainer import Trainer


def train(trainer: Trainer, section: Adapter, found: Found | None, ledger: RunChecks) -> None:
    """Train with run checks, and compare the weights before and after training."""
    ledger.check()
    adapted: Any = trainer.model
    rounded = trainable_parameters.train_in_fp32(adapted) if section.type != "full" else {}
    if deepspeed_zero.used() and section.type != "full":
        deepspeed_zero.cast(adapted, trainer.accelerator.mixed_precision)
    before = verify_saved.fingerprints(adapted)
    trainer.train_from(found.path if found else None)
    ended_by = next((one.patience for one in trainer.validations if one.ran_out), None)
    stopping.add_steps_check(trainer.state, trainer.first_step.planned.steps, ended_by, ledger)
    launch_checks.add_repeated_check(trainer, ledger)
    launch_checks.add_loader_check(trainer, ledger)
    if trainer.state.global_step >= trainer.first_step.first:  # a run may resume after its last step
        gradient_reduction.add_receipt(trainer.model_wrapped, trainer.exchanged, ledger)
    if trainer.loss.installed:
        tokens, routers = trainer.sums.get(expert_use.TOKENS), trainer.loss.installed.routers
        idle = expert_use.add_check(trainer.accelerator, tokens, routers, ledger)
        if idle and trainer.metrics:
            trainer.metrics.screen.say(f"warning: {idle}")
    trainer.loss.remove()  # it holds the model, which is loaded again
    if section.type != "full":
        same = fingerprint.fingerprint(trainable_parameters.frozen(adapted))
        ledger.add(
            "base weights after training",
            trainer.contract["base"],
            same,
            "hash of every frozen tensor, before and after",
        )
    verify_saved.add_moved_receipt(before, adapted, trainer.state.global_step, ledger)
    trainer.writer.add_receipt(ledger)
    for validation in trainer.validations:
        validation.restore(adapted, trainer.state, ledger)
    for name, dtype in rounded.items():
        adapted.get_parameter(name).data = adapted.get_parameter(name).data.to(dtype)
    ratio = section.ours("loraplus_lr_ratio")
    if ratio:
        optimizers.add_loraplus_receipt(adapted, trainer.optimizer, trainer.args.learning_rate, ratio, ledger)
    if trainer.regularizer is not None:
        used, budget = adalora.ranks(adapted)
        ledger.add("AdaLoRA ranks", budget, used, "ranks left by the masks, summed over modules")
        adalora.drop_masked_ranks(adapted)
    ledger.check()
