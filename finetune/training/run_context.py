"""The recipe, machine and folder of a run, which every stage needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.training.auto_correction import NONE

if TYPE_CHECKING:
    from finetune.autoconfig.machine_setup import Setup
    from finetune.checkpointing.checkpoints import VerifiedCheckpoint
    from finetune.core.console import Console
    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder
    from finetune.training.auto_correction import Correction


@dataclass(frozen=True)
class RunContext:
    """A run: its recipe, its machine and launch, and where its results go."""

    recipe: Recipe
    setup: Setup
    """The machine, the launch, and the attention and storage that were chosen for them."""
    checks: RunChecks
    console: Console
    folder: RunFolder
    checkpoint: VerifiedCheckpoint | None = None
    """The checkpoint that the run resumes."""
    correction: Correction = NONE
    """What an earlier start changed, because the first step ran out of memory."""
