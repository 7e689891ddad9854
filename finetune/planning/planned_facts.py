"""Gather the facts of a run that is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import launch_settings
from finetune.autoconfig.batch_size import split_batch
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.planning import adapter_size, dataset_estimate, planned_storage
from finetune.planning.planned_run import PlannedRun, Target
from finetune.planning.sharding_cost import Sharding

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe


def planned_run(
    recipe: Recipe, machine: Hardware, processes: int, by: Sharding
) -> tuple[PlannedRun, dict[str, Choice]]:
    """Return the facts of a run, and the choices that they need: base model storage and attention."""
    model = architecture.read(recipe.model)
    target = Target(machine, processes, by, by.precision or launch_settings.read(machine).precision)
    base, attention = planned_storage.storage_and_attention(recipe, model, target)
    batch = split_batch(recipe.train, processes // by.sharing)
    rows = dataset_estimate.rows_of(recipe.data, recipe.model, batch.per_device, recipe.train.seed)
    steps = dataset_estimate.known_steps(recipe.train, rows, batch, processes // by.sharing)
    run = PlannedRun(
        recipe=recipe,
        target=target,
        model=model,
        adapter=adapter_size.adapted(recipe.adapter, recipe.model, model, steps or 100),
        storage=base.value,
        attention="cudnn"
        if by.sharing > 1
        else attention.value,  # context parallelism runs SDPA without a mask
        batch=batch,
        rows=rows,
        steps=steps,
    )
    return run, {"quantization": base, "attention": attention}
