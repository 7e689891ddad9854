"""The facts of a planned run before any choice is made: recipe, machine, launch, model and data.

The storage of the base model and the attention belong to them, because the other choices need them.
"""

from __future__ import annotations

from dataclasses import dataclass

from finetune.autoconfig import launch_settings, machine_setup
from finetune.autoconfig.batch_size import Batch, split_batch
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.models.architecture import Architecture
from finetune.planning import adapter_size, dataset_estimate, sharding_cost
from finetune.planning.adapter_size import Adapted
from finetune.planning.dataset_estimate import DataEstimate
from finetune.planning.sharding_cost import Sharding
from finetune.preflight import model_checks
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


def planned_run(
    recipe: Recipe, machine: Hardware, processes: int, by: Sharding
) -> tuple[PlannedRun, dict[str, Choice]]:
    """Return the facts of a run, and the choices that they need: base model storage and attention.

    Raises:
        UserError: the machine can't run the requested storage, attention or loss (exit 3).
    """
    model = architecture.read(recipe.model)
    target = Target(machine, processes, by, by.precision or launch_settings.read(machine).precision)
    launch = sharding_cost.launched(by, 1, target.precision)
    stored = model_checks.check_stored(recipe, model.config)
    setup = machine_setup.choose_for_training(recipe, model.config, stored, on=(machine, launch))
    batch = split_batch(recipe.train, processes // by.sharing)
    rows = dataset_estimate.rows_of(recipe.data, recipe.model, batch.per_device, recipe.train.seed)
    steps = dataset_estimate.known_steps(recipe.train, rows, batch, processes // by.sharing)
    run = PlannedRun(
        recipe=recipe,
        target=target,
        model=model,
        adapter=adapter_size.adapted(recipe.adapter, recipe.model, model, steps or 100),
        storage=setup.storage.value,
        attention="cudnn"
        if by.sharing > 1
        else setup.attention.value,  # context parallelism: SDPA without a mask
        batch=batch,
        rows=rows,
        steps=steps,
    )
    return run, {"quantization": setup.storage, "attention": setup.attention}
