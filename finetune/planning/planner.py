"""`finetune plan`: memory, time and cost of a recipe before a weight is loaded, and what to change.

    finetune plan recipes/llama3_8b/lora.yaml --gpu h100-80gb --gpus 8 --price-per-hour 2.5

The plan calls the same functions of `autoconfig` as a run, so that both make the same choices.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from finetune.autoconfig import machine_setup, memory_estimate, mixed_precision, optimizer_choice
from finetune.autoconfig.batch_size import MARGIN, Batch, most_processes, sizes, split_batch
from finetune.autoconfig.decisions import decide, decide_fused
from finetune.core.errors import Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.hardware import detection, gpus
from finetune.hardware.detection import Hardware
from finetune.launch.launcher import Start
from finetune.models import architecture
from finetune.planning import (
    adapter_size,
    dataset_estimate,
    measured_rates,
    memory_by_phase,
    plan_notes,
    planned_spec,
    sharding_cost,
    step_time,
)
from finetune.planning.planned_run import PlannedRun, Target
from finetune.planning.sharding_cost import DDP, FSDP2, ONE, Sharding
from finetune.preflight import choice_checks, launch_conflicts
from finetune.recipe import adapter_types

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

COMPILE_SECONDS = 25  # compilation in the first step (benchmarks/gpu.json)


@dataclass(frozen=True)
class Plan:
    """The memory, time and choices of a recipe on a machine."""

    machine: Hardware
    processes: int
    choices: dict[str, Choice]
    batch: Batch
    tokens: int
    """The largest number of tokens in one forward pass, for which memory is planned."""
    steps: int | None
    phases: dict[str, dict[str, float]]
    """GiB by phase and kind."""
    usable: float
    """GiB of a device that a run may use."""
    parts: dict[str, float]
    """Seconds of a step by kind of work; empty: not known."""
    row_tokens: float
    """Mean tokens of a row; `data.max_length` if the data is not known."""
    trained: int
    source: str
    notes: tuple[str, ...]
    by: Sharding
    """How the launch divides the training."""
    refused: str = ""
    """Why a run would refuse the data."""
    sent: tuple[float, float] = (0.0, 0.0)
    """Bytes that a GPU sends in a step, and its bandwidth in bytes/s; 0: not known."""
    kept_free: float = 0.0
    """GiB that a step must leave free for NCCL, compiled code and fragmentation, if weights are sharded."""

    @property
    def peak(self) -> float:
        """GiB of the largest phase of training."""
        return max(sum(self.phases[name].values()) for name in ("load", "step", "save"))

    @property
    def needed(self) -> float:
        """GiB that must be usable: the peak, or the step plus the memory that it must leave free."""
        return max(self.peak, sum(self.phases["step"].values()) + self.kept_free)

    @property
    def host(self) -> float:
        """GiB of CPU memory that one process fills by offloading."""
        return sum(self.phases.get(memory_by_phase.HOST, {}).values())

    @property
    def fits(self) -> bool:
        room = self.machine.host_gib
        return self.needed <= self.usable and (room is None or self.host * self.processes <= room)

    @property
    def step_seconds(self) -> float | None:
        return sum(self.parts.values()) if self.parts else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s over all processes, without padding."""
        return self.step_tokens / self.step_seconds if self.step_seconds else None

    @property
    def step_tokens(self) -> float:
        return self.batch.effective * self.row_tokens

    @property
    def seconds(self) -> float | None:
        """Seconds of training, including compilation; `None`: not known."""
        if not self.step_seconds or self.steps is None:
            return None
        return self.steps * self.step_seconds + COMPILE_SECONDS * (self.choices["compile"].value == "on")


def planned_machine(name: str | None, count: int | None) -> tuple[Hardware, int]:
    """Return the machine to plan for and its number of processes.

    Args:
        name: a GPU of the table; `None`: this machine.
        count: the number of GPUs; `None`: one GPU of the table, or all GPUs of this machine.

    Raises:
        UserError: the table has no such GPU, or `count` is given on a machine without a GPU (exit 2).
    """
    if name is not None:
        gpu, cores = gpus.named(name), os.cpu_count() or 1
        device = f"NVIDIA {' '.join(gpu.device)}"
        found = Hardware("cuda", device, count or 1, gpu.capability, gpu.memory_gib, cores, here=False)
        return found, found.count
    here = detection.detect()
    if here.device == "cpu":
        if count is not None:
            fix = f"--gpu {next(iter(gpus.GPUS))} --gpus {count}"
            what = "this machine has no GPU, so the plan needs --gpu"
            raise UserError(Problem(what, "--gpus", found=str(count), fix=fix, code="hardware"))
        return here, 1
    from finetune.checkpointing import training_state  # imports torch, as `detect` did

    room = training_state.available() / 2 / memory_estimate.GIB  # a run uses half of the free CPU memory
    return replace(here, host_gib=room), count or int(os.environ.get("WORLD_SIZE", here.count))


def make(
    recipe: Recipe,
    machine: Hardware,
    processes: int,
    cpu_rate: float | None = None,
    by: Sharding | None = None,
) -> Plan:
    """Plan a recipe.

    Args:
        cpu_rate: FLOP/s of a layer on the CPU, if it was timed.
        by: how the launch divides the training; `None`: as `finetune train` chooses it. That choice uses
            fewer processes if the batch can't be divided between all.

    Raises:
        UserError: a run would refuse the recipe too.
    """
    if by is not None or processes == 1:
        return under(recipe, machine, processes, by or ONE, cpu_rate)
    processes, fewer = most_processes(recipe.train, processes)
    if processes == 1:
        alone = under(recipe, machine, 1, ONE, cpu_rate)
        return replace(alone, choices={"launch": Choice("single_gpu", fewer), **alone.choices})
    whole = under(recipe, machine, processes, DDP, cpu_rate)
    split, refused = (None, "") if whole.fits else _split(recipe, machine, processes, cpu_rate)
    # Layers are not fused under FSDP2, so a shard may need more memory than a whole quantized base model.
    made = split if split and (split.fits or split.peak < whole.peak) else whole
    parts = (split.peak if split.fits else split.needed) if split else None
    storage, fp8 = made.choices["quantization"].value, not mixed_precision.fp8_missing(machine, "bf16")
    sizes_gib = sharding_cost.Sizes(machine.memory_gib, made.usable, whole.peak, parts)
    smaller = sharding_cost.smaller(storage, recipe.adapter.type, fp8=fp8)
    reason = sharding_cost.reason(processes, sizes_gib, smaller, refused)
    reason = f"{fewer}; {reason}" if fewer else reason
    launch = Choice(sharding_cost.config_name(made.by, storage), reason)
    return replace(made, choices={"launch": launch, **made.choices})


def _split(
    recipe: Recipe, machine: Hardware, processes: int, cpu_rate: float | None
) -> tuple[Plan | None, str]:
    """Plan the recipe under FSDP2 as `auto` would start it.

    Returns:
        The plan and the empty string, or `None` and why FSDP2 can't run the recipe.
    """
    try:
        made = under(recipe, machine, processes, FSDP2, cpu_rate)
        storage = made.choices["quantization"].value
        refuse(recipe, machine, processes, sharding_cost.split_config(FSDP2, storage, processes))
    except UserError as error:
        return None, error.problems[0].what
    return made, ""


def launch_of(recipe: Recipe, machine: Hardware) -> Start:
    """Choose the shipped accelerate config for the GPUs of this machine, as the plan does, with the reason.

    Raises:
        UserError: this machine or its number of processes does not support the recipe (exit 2 or 3).
    """
    choice_checks.setup_of(recipe)
    made = make(recipe, machine, machine.count)
    return Start(*made.choices["launch"], made.processes)


def under(
    recipe: Recipe, machine: Hardware, processes: int, by: Sharding, cpu_rate: float | None = None
) -> Plan:
    """Plan a recipe under a launch.

    `per_device_train_batch_size: auto` becomes the largest micro-batch size that fits, by the rule of
    `batch_search`. Activation checkpointing is chosen for a micro-batch of one row, as in a run.

    Raises:
        UserError: `auto` is used with sharded weights (exit 2). The machine lacks the precision (exit 3). A
            run would refuse the recipe.
    """
    mixed_precision.check_precision(by.precision, machine)
    refuse(recipe, machine, processes, by)
    if recipe.train.per_device_train_batch_size != "auto":
        return at_once(recipe, machine, processes, by, cpu_rate)
    if by.weights:
        key, what = (
            "train.per_device_train_batch_size",
            f"{by.name} does not work with a search for the batch size",
        )
        why, fix = (
            f"the search runs before {by.name} shards the weights",
            f"set `{key}: 1` or a larger number",
        )
        raise UserError(Problem(what, key, found="auto", why=why, fix=fix, code="launch-config"))

    def of(rows: int, checkpointing: str, offload: str) -> Plan:
        train = recipe.train.model_copy(update={"per_device_train_batch_size": rows})
        speed = recipe.speed.model_copy(
            update={"activation_checkpointing": checkpointing, "offload": offload}
        )
        asked = recipe.model_copy(update={"train": train, "speed": speed})
        return at_once(asked, machine, processes, by, cpu_rate, searched=True)

    chosen = of(1, recipe.speed.activation_checkpointing, recipe.speed.offload)
    checkpointing, offload = chosen.choices["activation checkpointing"], chosen.choices["offload"]
    usable = MARGIN * (
        machine.memory_gib - (memory_by_phase.CONTEXT_GIB if machine.device == "cuda" else 0.0)
    )
    for rows in sizes(chosen.batch.accumulation, chosen.batch.accumulation)[1:]:
        made = of(rows, checkpointing.value, offload.value)
        if made.peak > usable:
            break
        chosen = made
    note = plan_notes.searched(chosen.batch.per_device, recipe.data.max_length, MARGIN)
    choices, usable = (
        {**chosen.choices, "activation checkpointing": checkpointing, "offload": offload},
        min(usable, chosen.usable),
    )
    return replace(chosen, choices=choices, usable=usable, notes=(*chosen.notes, note))


def refuse(recipe: Recipe, machine: Hardware, processes: int, by: Sharding) -> None:
    """Refuse names that match nothing in the model and settings that the launch does not support.

    `check` and a run refuse them too.

    Raises:
        UserError: exit 3 for the optimizer and offloading, else exit 2.
    """
    choice_checks.check_model(recipe)
    found = architecture.read(recipe.model)
    if problems := choice_checks.against_names(recipe, found.names):
        raise UserError(*problems)
    if by.sharing > 1:
        launch_conflicts.against_window(found.config)
    asked = recipe.adapter, recipe.model, recipe.data, recipe.speed, recipe.eval.eval_steps
    with launch_environment.under(dict(by.variables)):
        contradictions = launch_conflicts.against(machine, *asked)
        contradictions += launch_conflicts.deepspeed_values(recipe.train, processes // by.sharing)
        if contradictions:
            raise UserError(*contradictions)
    launched = sharding_cost.launched(by, processes, mixed_precision.launch(machine).precision)
    none = Choice("", "")
    optimizer_choice.check(recipe.train, recipe.speed, machine_setup.Setup(machine, launched, none, none))


def at_once(
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
    run, fixed = planned_run(recipe, machine, processes, by)
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


def planned_run(
    recipe: Recipe, machine: Hardware, processes: int, by: Sharding
) -> tuple[PlannedRun, dict[str, Choice]]:
    """Return the facts of a run, and the choices that they need: base model storage and attention."""
    model = architecture.read(recipe.model)
    target = Target(machine, processes, by, by.precision or mixed_precision.launch(machine).precision)
    base, attention = planned_spec.storage_and_attention(recipe, model, target)
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
) -> step_time.Step:
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
    whole, mlps = memory_estimate.split(chosen.checkpointing, memory.layers)
    halves = (mlps if memory.mlps else 0) / memory.layers
    return step_time.Step(
        tokens=run.batch.per_device * row // by.sharing,
        length=max(1, round(rows.attended)) if rows else data.max_length,
        passes=run.batch.accumulation,
        storage=run.storage,
        full=run.full,
        recomputed=whole / memory.layers,
        halves=halves,
        processes=run.target.processes,
        flat=data.packing or data.padding_free,
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


def cpu_rate(recipe: Recipe) -> float:
    """Return FLOP/s of a layer of this model on this CPU.

    The rate comes from `finetune doctor --measure`, or is measured now.
    """
    one = memory_estimate.widths(architecture.read(recipe.model).config)
    found, _ = measured_rates.read_for("CPU", one)
    return found["layer"] if found else measured_rates.layer(one)
