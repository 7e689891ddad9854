"""The facts of a planned run before any choice is made: recipe, machine, launch, model and data.

The storage of the base model and the attention belong to them, because the other choices need them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from finetune.autoconfig import (
    attention_choice,
    base_quantization,
    launch_settings,
    mixed_precision,
)
from finetune.autoconfig.batch_size import Batch, split_batch
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.models import architecture, fp8_support
from finetune.models.architecture import Architecture
from finetune.planning import adapter_size, dataset_estimate, sharding_cost
from finetune.planning.adapter_size import Adapted
from finetune.planning.dataset_estimate import DataEstimate
from finetune.planning.sharding_cost import Sharding
from finetune.preflight import model_checks
from finetune.recipe import adapter_types
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
    base, attention = storage_and_attention(recipe, model, target)
    batch = split_batch(recipe.train, processes // by.sharing)
    rows = dataset_estimate.rows_of(recipe.data, recipe.model, batch.per_device, recipe.train.seed)
    steps = dataset_estimate.known_steps(recipe.train, rows, batch, processes // by.sharing)
    run = PlannedRun(
        recipe=recipe,
        target=target,
        model=model,
        adapter=adapter_size.adapted(recipe.adapter, recipe.model, model, steps or 100),
        storage=base.value,
        attention="cudnn" if by.sharing > 1 else attention.value,  # context parallelism: SDPA without a mask
        batch=batch,
        rows=rows,
        steps=steps,
    )
    return run, {"quantization": base, "attention": attention}


def storage_and_attention(recipe: Recipe, found: Architecture, target: Target) -> tuple[Choice, Choice]:
    """Choose the base model's storage and the attention, as `choice_checks.setup_of` does for a run."""
    flat, kind = recipe.data.packing or recipe.data.padding_free, recipe.adapter.type
    against = partial(fp8_support.against_fp8, recipe, found.config)
    by, precision, machine = target.by, target.precision, target.machine
    launched = sharding_cost.launched(by, 1, precision)
    if kept := base_quantization.whole_base(launched):
        against = partial(str, kept)
    quantization = (
        "fp8" if by.frozen_fp8 and recipe.model.quantization == "auto" else recipe.model.quantization
    )
    stored = model_checks.check_stored(recipe, found.config)
    base = base_quantization.choose_base(quantization, kind, precision, machine, against, stored)
    dtype = mixed_precision.compute_dtype(precision, base.value)
    shown = attention_choice.RowLayout(flat, recipe.data.max_length, adapter_types.find(kind).prompt)
    attends = attention_choice.read(found.config)
    return base, Choice(*attention_choice.choose(recipe.model.attention, machine, dtype, attends, shown))
