"""What a plan knows of a run before it chooses: recipe, machine, launch, model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.autoconfig.batch_size import Batch
    from finetune.hardware.detection import Hardware
    from finetune.models.architecture import Architecture
    from finetune.planning.adapter_size import Adapted
    from finetune.planning.dataset_estimate import Rows
    from finetune.planning.sharding_cost import Sharding
    from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Target:
    """Where a run would train: `processes` of one machine, and how the launch divides the training."""

    machine: Hardware
    processes: int
    by: Sharding
    precision: str
    """The launch's mixed_precision: no, fp16 or bf16."""


@dataclass(frozen=True)
class PlannedRun:
    """A recipe on a target, with what is known of its model and its data before either is loaded."""

    recipe: Recipe
    target: Target
    model: Architecture
    adapter: Adapted
    storage: str
    """How the base model would be stored: bf16, fp8, nf4."""
    attention: str
    """The kernel of a training step."""
    batch: Batch
    rows: Rows | None
    """Lengths of the data; `None`: not known."""
    steps: int | None

    @property
    def full(self) -> bool:
        """Whether every weight trains."""
        return self.recipe.adapter.type == "full"

    @property
    def tokens(self) -> int:
        """Of one forward pass of a process, at most."""
        return self.batch.per_device * self.recipe.data.max_length // self.target.by.sharing

    @property
    def row_tokens(self) -> float:
        """Of a row, on average; of full rows, if nothing is known of the data."""
        return self.rows.tokens if self.rows else self.recipe.data.max_length
