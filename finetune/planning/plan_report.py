"""Print a plan and its suggestions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from finetune.core import progress
from finetune.core.console import Console
from finetune.core.formatting import WARNING, amount, duration, figure
from finetune.data import template_sandbox
from finetune.hardware import gpus
from finetune.hardware.detection import Hardware
from finetune.planning import measured_rates, plan_notes, planned_machine, planner, suggestions
from finetune.planning.plan import Plan
from finetune.planning.suggestions import Change
from finetune.preflight import model_checks
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe

LABELS = {"quantization": "base model weights", "fused": "fused adapters"}  # name of a choice -> shown name
KINDS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers", "CUDA graphs")
WORK = {"products": "GEMMs", "launch gaps": "GPU idle", "to the CPU and back": "CPU transfers"}  # shown as


def run(
    recipe: Recipe, overrides: list[str], screen: Console, requested: planned_machine.PlanRequest
) -> tuple[Plan, list[Change]]:
    """Plan a recipe and its cheapest changes, and print both.

    Args:
        overrides: the overrides that the recipe was loaded with.

    Raises:
        UserError: the recipe or the command line is wrong, or a run would refuse them.
    """
    model_checks.check_model(recipe)
    # The renderer starts while torch is imported, which takes as long. If torch is imported already, the
    # renderer starts after the CPU is timed, so that it does not slow the measurement.
    imported = "torch" in sys.modules
    if not imported:
        template_sandbox.start()
    machine, processes, by = planned_machine.of_arguments(requested)
    rate = measured_rates.cpu_rate(recipe) / processes if machine.device == "cpu" else None
    if imported:
        template_sandbox.start()
    with progress.phase(screen, "planning"):
        made = planner.make(recipe, machine, processes, rate, by)
        found = suggestions.changes(recipe, overrides, made, rate, by)
    show(screen, recipe, made, found, requested.price)
    return made, found


def next_command(now: Plan, found: list[Change]) -> list[str]:
    """Return the next command and its overrides: train what fits, or plan the first change that fits."""
    if now.refused:
        return ["data"]
    if now.fits:
        return ["train"]
    return ["plan", *found[0].overrides] if found else []


def as_json(now: Plan, found: list[Change]) -> dict[str, Any]:
    """Return a plan with the field names of `finetune plan --json`. Memory is in GiB, time in seconds."""
    return {
        **_figures(now),
        "device": now.machine.name,
        "processes": now.processes,
        "memory_by_phase": now.phases,
        "steps": now.steps,
        "step_parts": now.parts,
        "effective_batch_size": now.batch.effective,
        "per_device_train_batch_size": now.batch.per_device,
        "gradient_accumulation_steps": now.batch.accumulation,
        "trainable_parameters": now.trained,
        "choices": now.choices,
        "refused": now.refused,
        "notes": now.notes,
        "suggestions": [
            {"overrides": one.overrides, "trade_off": one.cost, **_figures(one.plan)} for one in found
        ],
    }


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "peak_memory": plan.peak,
        "usable_memory": plan.usable,
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second,
        "training_seconds": plan.seconds,
    }


def show(screen: Console, recipe: Recipe, now: Plan, found: list[Change], price: float | None) -> None:
    """Print the headline, the tables of memory, time and choices, the suggestions and the notes."""
    screen.say("", headline(recipe, now))
    phases = now.phases.values()
    taken = [kind for kind in KINDS if any(kind in phase for phase in phases)]
    rows = [[kind, *(_gib(phase.get(kind)) for phase in phases)] for kind in taken]
    rows.append(["all", *(_gib(sum(phase.values())) for phase in phases)])
    screen.table("memory per device, GiB", ("", *now.phases), rows)
    screen.table("time", ("what", "planned"), list(times(now, price)))
    chosen = [
        (LABELS.get(name, name), one.value, one.reason.removeprefix("auto: "))
        for name, one in now.choices.items()
    ]
    screen.table("choices", ("what", "choice", "why"), chosen)
    what = "faster" if now.fits else "changes that fit"
    if found:
        screen.table(what, ("change", "peak GiB", "tokens/s", "trade-off"), [_row(one, now) for one in found])
    else:
        faster = "no single change of this recipe is much faster"
        screen.say(faster if now.fits else "no change of this recipe fits; use a larger GPU")
    warned = [line for line in adapter_types.advice(recipe) if line.startswith(WARNING)]
    screen.note(*warned, *now.notes)


def headline(recipe: Recipe, now: Plan) -> str:
    """Return one line that says whether the run fits, how fast it is and how long it takes."""
    verdict = "fits" if now.fits else "does not fit"
    if now.fits and not suggestions.evaluation_fits(recipe, now):
        verdict = "training fits, evaluation does not"
    verdict = f"`finetune train` does not accept the data; {verdict}" if now.refused else verdict
    text = (
        f"{recipe.adapter.type} on {recipe.model.name}, {now.processes} x {_device(now.machine)}: {verdict}, "
        f"{_largest(recipe, now)} of {now.usable:.1f} GiB"
    )
    if now.peak <= now.usable < now.needed:
        text += f", of which {now.kept_free:.1f} are reserved for NCCL and fragmentation"
    if now.machine.host_gib is not None and now.host * now.processes > now.machine.host_gib:
        text += f", {now.host * now.processes:.1f} of {now.machine.host_gib:.1f} GiB of CPU memory"
    if now.tokens_per_second:
        text += f"; {now.tokens_per_second:,.0f} tokens/s"
    return f"{text}; {duration(now.seconds)} of training" if now.seconds else text


def _largest(recipe: Recipe, now: Plan) -> str:
    """Return GiB of training, and of evaluation if it needs more."""
    evaluated = sum(now.phases["evaluation"].values())
    if not plan_notes.evaluates(recipe.data, recipe.eval) or round(evaluated, 1) <= round(now.peak, 1):
        return f"{now.peak:.1f}"
    return f"training {now.peak:.1f} and evaluation {evaluated:.1f}"


def times(now: Plan, price: float | None) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table of time, energy and cost."""
    batch = now.batch
    parts = f"micro-batch {batch.per_device} x {batch.accumulation} accumulation x {now.processes} process"
    yield "batch", f"{batch.effective} sequences per step: {parts}{'es' * (now.processes > 1)}"
    yield "trainable", f"{now.trained:,} parameters"
    if now.step_seconds is None:
        yield "s per step", "not known"
    else:
        shares = ", ".join(
            f"{WORK.get(name, name)} {value / now.step_seconds:.0%}"
            for name, value in now.parts.items()
            if value
        )
        yield "s per step", f"{figure(now.step_seconds)} ({shares})"
        yield "tokens/s", f"{now.tokens_per_second:,.0f}"
    size, link = now.sent
    if link:
        waits = now.parts.get("communication", 0.0)
        text = f"{size / 1e9:,.3g} GB per step and GPU, {figure(size / link)} s at {link / 1e9:,.0f} GB/s"
        name = now.by.name + (f", {now.by.sharing} GPUs per sequence" if now.by.sharing > 1 else "")
        yield "between GPUs", f"{name}: {text}; {figure(waits)} s do not overlap with computation"
    yield "rates", now.source
    yield "steps", f"{now.steps:,}" if now.steps is not None else "not known"
    if now.seconds:
        yield "training", f"{duration(now.seconds)}; time, energy and cost exclude evaluation and saving"
        hours = now.seconds * now.processes / 3600
        gpu = gpus.of_device(now.machine.name) if now.machine.device == "cuda" else None
        if gpu:
            used = amount(hours * gpu.watts / 1000)
            yield "energy", f"{used} kWh with GPUs at their limit of {gpu.watts} W"
        if price is not None:
            yield "cost", f"{amount(hours * price)}: {amount(hours)} device hours at {price:g}"
    elif price is not None and now.tokens_per_second:
        hours = 1e9 / now.tokens_per_second * now.processes / 3600
        text = f"{amount(hours * price)} per billion tokens (the number of steps is not known)"
        yield "cost", f"{text}: {amount(hours)} device hours at {price:g}"
    elif price is not None:
        yield "cost", "not known"


def _row(one: Change, now: Plan) -> list[str]:
    made, speeds = one.plan, (now.tokens_per_second, one.plan.tokens_per_second)
    rate = "not known"
    if speeds[0] and speeds[1]:
        rate = f"{speeds[1]:,.0f} ({speeds[1] / speeds[0] - 1:+.0%})"
    return [" ".join(one.overrides), f"{made.peak:.1f} ({made.peak - now.peak:+.1f})", rate, one.cost]


def _gib(value: float | None) -> str:
    return "" if not value else amount(value) if value >= 0.01 else "0.00"


def _device(machine: Hardware) -> str:
    return f"{machine.name.removeprefix('NVIDIA ')} {machine.memory_gib:.0f} GiB"
