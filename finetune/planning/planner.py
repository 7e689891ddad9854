"""`finetune plan`: memory, time and cost of a recipe before a weight is loaded, and what to change.

    finetune plan recipes/llama3_8b/lora.yaml --gpu h100-80gb --gpus 8 --price-per-hour 2.5

The plan calls the same functions of `autoconfig` as a run, so that both make the same choices.
"""

from __future__ import annotations

from dataclasses import replace

from finetune.autoconfig import mixed_precision
from finetune.autoconfig.batch_size import MARGIN, most_processes, sizes
from finetune.core.errors import Problem, UserError
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.launch.launcher import LaunchChoice
from finetune.planning import (
    memory_by_phase,
    plan_notes,
    planned_machine,
    planned_step,
    refusals,
    sharding_cost,
)
from finetune.planning.plan import Plan
from finetune.planning.sharding_cost import DDP, FSDP2, ONE, Sharding
from finetune.preflight import choice_checks
from finetune.recipe.schema import Recipe


def make_for(recipe: Recipe, gpu: str | None, gpus: int | None) -> Plan:
    """Plan a recipe for a number of GPUs of a type; `None`: as on this machine."""
    return make(recipe, *planned_machine.find(gpu, gpus))


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
        return plan_launch(recipe, machine, processes, by or ONE, cpu_rate)
    processes, fewer = most_processes(recipe.train, processes)
    if processes == 1:
        alone = plan_launch(recipe, machine, 1, ONE, cpu_rate)
        return replace(alone, choices={"launch": Choice("single_gpu", fewer), **alone.choices})
    whole = plan_launch(recipe, machine, processes, DDP, cpu_rate)
    split, refused = (None, "") if whole.fits else _split(recipe, machine, processes, cpu_rate)
    # Layers are not fused under FSDP2, so a shard may need more memory than a whole quantized base model.
    made = split if split and (split.fits or split.peak < whole.peak) else whole
    parts = (split.peak if split.fits else split.needed) if split else None
    storage, fp8 = made.choices["quantization"].value, not mixed_precision.fp8_missing(machine, "bf16")
    sizes_gib = sharding_cost.Sizes(machine.memory_gib, made.usable, whole.peak, parts)
    smaller = sharding_cost.smaller(storage, recipe.adapter.type, fp8=fp8)
    reason = sharding_cost.reason(processes, sizes_gib, smaller, refused)
    reason = f"{fewer}; {reason}" if fewer else reason
    return replace(
        made, choices={"launch": Choice(sharding_cost.config_name(made.by, storage), reason), **made.choices}
    )


def _split(
    recipe: Recipe, machine: Hardware, processes: int, cpu_rate: float | None
) -> tuple[Plan | None, str]:
    """Plan the recipe under FSDP2 as `auto` would start it.

    Returns:
        The plan and the empty string, or `None` and why FSDP2 can't run the recipe.
    """
    try:
        made = plan_launch(recipe, machine, processes, FSDP2, cpu_rate)
        storage = made.choices["quantization"].value
        refusals.refuse(recipe, machine, processes, sharding_cost.split_config(FSDP2, storage, processes))
    except UserError as error:
        return None, error.problems[0].what
    return made, ""


def launch_of(recipe: Recipe, machine: Hardware) -> LaunchChoice:
    """Choose the shipped accelerate config for the GPUs of this machine, as the plan does, with the reason.

    Raises:
        UserError: this machine or its number of processes does not support the recipe (exit 2 or 3).
    """
    choice_checks.setup_of(recipe)
    made = make(recipe, machine, machine.count)
    return LaunchChoice(*made.choices["launch"], made.processes)


def plan_launch(
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
    refusals.refuse(recipe, machine, processes, by)
    if recipe.train.per_device_train_batch_size != "auto":
        return planned_step.plan_step(recipe, machine, processes, by, cpu_rate)
    if by.weights:
        key, what = (
            "train.per_device_train_batch_size",
            f"{by.name} does not work with a search for the batch size",
        )
        raise UserError(
            Problem(
                what,
                key,
                found="auto",
                why=f"the search runs before {by.name} shards the weights",
                fix=f"set `{key}: 1` or a larger number",
                code="launch-config",
            )
        )

    def plan_rows(rows: int, checkpointing: str, offload: str) -> Plan:
        train = recipe.train.model_copy(update={"per_device_train_batch_size": rows})
        speed = recipe.speed.model_copy(
            update={"activation_checkpointing": checkpointing, "offload": offload}
        )
        changed = recipe.model_copy(update={"train": train, "speed": speed})
        return planned_step.plan_step(changed, machine, processes, by, cpu_rate, searched=True)

    chosen = plan_rows(1, recipe.speed.activation_checkpointing, recipe.speed.offload)
    checkpointing, offload = chosen.choices["activation checkpointing"], chosen.choices["offload"]
    usable = MARGIN * (
        machine.memory_gib - (memory_by_phase.CONTEXT_GIB if machine.device == "cuda" else 0.0)
    )
    for rows in sizes(chosen.batch.accumulation, chosen.batch.accumulation)[1:]:
        made = plan_rows(rows, checkpointing.value, offload.value)
        if made.peak > usable:
            break
        chosen = made
    note = plan_notes.searched(chosen.batch.per_device, recipe.data.max_length, MARGIN)
    choices, usable = (
        {**chosen.choices, "activation checkpointing": checkpointing, "offload": offload},
        min(usable, chosen.usable),
    )
    return replace(chosen, choices=choices, usable=usable, notes=(*chosen.notes, note))
