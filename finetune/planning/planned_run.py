"""The facts of a planned run before any choice is made: recipe, machine, launch, model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.autoconfig.batch_size import Batch
    from finetune.hardware.detection import Hardware
    from finetune.models.architecture import Architecture
    from finetune.planning.adapter_size import Adapted
    from finetune.planning.dataset_estimate import DataEstimate
    from finetune.planning.sharding_cost import Sharding
    from finetune.recipe.schema import Recipe


@dataclass(frozen=True)
class Target:
    """The machine of a planned run, its processes, and how the launch divides the training."""

    machine: Hardware
    processes: int
    by: Sharding
    precision: str
    """The launch's mixed_precision: no, fp16 or bf16."""


@dataclass(frozen=True)
class PlannedRun:
    """A recipe on a target, with the facts of its model and its data before either is loaded."""

    recipe: Recipe
    target: Target
    model: Architecture
    adapter: Adapted
    storage: str
    """The storage of the base model's weights: bf16, fp8, nf4."""
    attention: str
    """The attention implementation of a training step."""
    batch: Batch
    rows: DataEstimate | None
    """The estimate of the data; `None`: not known."""
    steps: int | None

    @property
    def full(self) -> bool:
        """Whether every parameter trains."""
        return self.recipe.adapter.type == "full"

    @property
    def tokens(self) -> int:
        """The largest number of tokens in one forward pass of a process."""
        return self.batch.per_device * self.recipe.data.max_length // self.target.by.sharing

    @property
    def row_tokens(self) -> float:
        """Mean tokens of a row; `data.max_length` if the data is not known."""
        return self.rows.tokens if self.rows else self.recipe.data.max_length
