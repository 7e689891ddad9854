"""Compute the fingerprint of the frozen weights, which must be equal on all ranks and in a resumed run."""

from __future__ import annotations

from torch import nn

from finetune.adapters import initialization, trainable_parameters
from finetune.checkpointing import resume_contract, training_state
from finetune.checkpointing.checkpoints import VerifiedCheckpoint
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, launch_environment
from finetune.models import fingerprint


def frozen_fingerprint(adapted: nn.Module, checkpoint: VerifiedCheckpoint | None, checks: RunChecks) -> str:
    """Return the fingerprint of the frozen weights.

    Refuse a run that can't resume from `checkpoint`, before anything in its folder changes.
    """

    def look() -> str:
        return fingerprint.fingerprint(trainable_parameters.frozen(adapted))

    rebased = initialization.rebases(adapted)  # by rank 0, and DDP sends it to the others
    if launch_environment.read_by_rank_0() or rebased:
        frozen = collectives.from_main(look)
    else:
        frozen = look()
        collectives.agree({"weights of the base": frozen})
    if checkpoint:
        checks.check()
        resume_contract.check_base(checkpoint.contract, frozen, checkpoint.path, decomposed=rebased)
        training_state.structure(checkpoint.path)
    return frozen
