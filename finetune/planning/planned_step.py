"""Plan a recipe under one launch and one micro-batch size."""

from __future__ import annotations

from finetune.autoconfig import memory_estimate
from finetune.autoconfig.decisions import decide, decide_fused
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.planning import (
    dataset_estimate,
    memory_by_phase,
    plan_notes,
    planned_run,
    planned_spec,
    sharding_cost,
    step_time,
)
from finetune.planning.plan import Plan
from finetune.planning.planned_run import PlannedRun
from finetune.planning.sharding_cost import Sharding
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe


def plan_step(
    recipe: Recipe,
    machine: Hardware,
    processes: int,
    by: Sharding,
    cpu_rate: float | None = None,
    *,
    searched: bool = False,
) -> Plan:
    """Plan a recipe under a launch with the micro-batch size of the recipe.

    Args:
        searched: whether a search set the micro-batch size.
    """
    run, fixed = planned_run.planned_run(recipe, machine, processes, by)
    refused = dataset_estimate.refused(run.rows, recipe.data, run.batch)
    chosen, choices, kept_free = _choose(run, searched=searched)
    phases = memory_by_phase.phases(run, chosen)
    if adapter_types.unmerged(recipe.adapter.type, recipe.adapter.options()):
        phases.pop("merge", None)
    step = _step(run, chosen, phases)
    parts, source, link = step_time.of_step(run, chosen.kept, step, cpu_rate)
    moved = sum(sharding_cost.sent(by, processes, step.base, run.adapter.trained, run.batch.accumulation))
    moved += step_time.shared_rows(step, memory_estimate.widths(run.model.config)) * step.passes
    return Plan(
        machine=machine,
        processes=processes,
        choices={**fixed, **choices},
        batch=run.batch,
        tokens=run.tokens,
        steps=run.steps,
        phases=phases,
        usable=chosen.usable,
        parts={} if run.model.unknown else parts,
        row_tokens=run.row_tokens,
        trained=run.adapter.trained,
        source=source,
        notes=_notes(run, phases, chosen.usable, refused),
        by=by,
        refused=refused,
        sent=(moved, link) if processes > 1 else (0.0, 0.0),
        kept_free=kept_free,
    )


def _choose(run: PlannedRun, *, searched: bool) -> tuple[memory_by_phase.Chosen, dict[str, Choice], float]:
    """Choose as a run does for speed and memory. Also return the GiB that a step must leave free."""
    by, speed, machine = run.target.by, run.recipe.speed, run.target.machine
    sharded, share = by.name if by.weights else "", _share(run)
    fused = decide_fused(planned_spec.model_spec(run, fused=True), speed.fused, machine, sharded)
    spec = planned_spec.model_spec(run, fused=fused.value == "on")
    free, usable, kept_free = memory_by_phase.room(run, share)
    work = planned_spec.work(run, share, free, searched=searched)
    decided = decide(spec, speed, work, machine, fused)
    chosen = memory_by_phase.Chosen(
        kept=decided.keeps,
        memory=decided.memory,
        checkpointing=decided.checkpointing.value,
        share=share,
        usable=usable,
        graphs=decided.graphs.value == "on",
    )
    choices = {
        "fused": decided.fused,
        "compile": decided.compile,
        "CUDA graphs": decided.graphs,
        "activation checkpointing": decided.checkpointing,
        "offload": decided.offload,
    }
    return chosen, choices, kept_free


def _share(run: PlannedRun) -> sharding_cost.Share:
    """Return the weights that one process holds and gathers."""
    by, found, precision = run.target.by, run.model, run.target.precision
    depth = memory_estimate.widths(found.config).layers
    whole = depth if sharding_cost.keeps_layers(by) else sharding_cost.WHOLE_LAYERS
    gathered = memory_by_phase.gathered(found, run.storage, precision, full=run.full, layers=whole)
    outside = memory_by_phase.outside(found, precision)
    return sharding_cost.share(by, run.target.processes, gathered, outside, found.parameters)


def _step(
    run: PlannedRun, chosen: memory_by_phase.Chosen, phases: dict[str, dict[str, float]]
) -> step_time.Pass:
    """Describe what one process computes, recomputes and offloads in a forward and backward pass.

    Args:
        phases: GiB by phase and kind, for rows of `data.max_length` tokens.
    """
    memory, by, rows, data = chosen.memory, run.target.by, run.rows, run.recipe.data
    precision = run.target.precision
    every = memory_by_phase.gathered(run.model, run.storage, precision, full=False, layers=memory.layers)
    every += memory_by_phase.outside(run.model, precision)
    gone = phases.get(memory_by_phase.HOST, {})
    row = max(1, round(rows.padded)) if rows else data.max_length
    whole, mlps = memory_estimate.recomputed_layers(chosen.checkpointing, memory.layers)
    halves = (mlps if memory.mlps else 0) / memory.layers
    return step_time.Pass(
        tokens=run.batch.per_device * row // by.sharing,
        length=max(1, round(rows.attended)) if rows else data.max_length,
        passes=run.batch.accumulation,
        storage=run.storage,
        full=run.full,
        recomputed=whole / memory.layers,
        halves=halves,
        processes=run.target.processes,
        flat=data.flat,
        fp8_experts=run.recipe.speed.fp8_experts,
        by=by,
        base=every * memory_estimate.GIB,
        leaving=gone.get("activations", 0.0) * memory_estimate.GIB * row / data.max_length,
        stepped="optimizer" in gone,
        rounded=(1 - halves) * chosen.checkpointing.startswith("mlp_int8"),
        graphs=chosen.graphs,
    )


def _notes(
    run: PlannedRun, phases: dict[str, dict[str, float]], usable: float, refused: str
) -> tuple[str, ...]:
    """Return the notes on the recipe, on refused data, on merging and on the machine."""
    machine = run.target.machine
    notes = plan_notes.of_recipe(run, too_large=sum(phases["evaluation"].values()) > usable)
    notes += [refused] if refused and refused not in notes else []
    notes += plan_notes.of_merge(phases, usable, machine.device)
    gone = phases.get(memory_by_phase.HOST, {})
    return *notes, *plan_notes.of_machine(gone, machine.host_gib, run.target.processes, machine.device)
