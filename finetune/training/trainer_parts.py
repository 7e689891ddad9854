"""The parts that finetune adds to TRL's Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

from finetune.adapters import adalora
from finetune.speed import lm_head_loss
from finetune.training import first_step_checks, nan_detection, oom_recovery, optimizers, step_metrics
from finetune.training.auto_correction import Corrector
from finetune.training.eval_callback import Validate
from finetune.training.stopping import Schedule


@dataclass(frozen=True)
class TrainerParts:
    """The arguments of the Trainer in addition to TRL's. The Trainer is complete when it is constructed."""

    callbacks: Sequence[TrainerCallback]
    """All callbacks, including those below, in the order of their calls."""
    first_step: first_step_checks.FirstStep
    micro_batches: oom_recovery.MicroBatches
    loss: lm_head_loss.HeadLoss
    optimizer: optimizers.OptimizerChoice
    schedule: Schedule
    """Decides when to save and when to stop."""
    metrics: step_metrics.Metrics | None = None
    """Writes metrics.jsonl, and measures how long a step waits for its batch."""
    nonfinite: nan_detection.NonFinite | None = None
    validations: Sequence[Validate] = ()
    """The callback for evaluation during training. Empty without `eval.eval_steps`."""
    contract: Mapping[str, Any] = field(default_factory=dict)
    """The facts that must be equal when a run resumes from a checkpoint."""
    in_checkpoints: Sequence[Any] = ()
    """Parts with `state_dict` and `load_state_dict`: checkpoints hold their state."""
    corrector: Corrector | None = None
    """Starts the run again with stronger settings if its first step runs out of memory."""
    regularizer: adalora.Regularizer | None = None
    fixed_shape: tuple[int, int, int] | None = None
    """Tokens, examples and longest example of each flattened batch, if compiled code needs one shape."""
    loader_timeout: int = 0
    """Seconds to wait for a batch of a data loader worker; 0: without a limit."""
