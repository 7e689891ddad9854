"""What to change so that a recipe fits or is faster, each change planned anew; and how a plan is printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from finetune import (
    adapter_types,
    gpus,
    hardware,
    launch,
    launch_config,
    plan,
    plan_launch,
    plan_notes,
    plan_rows,
)
from finetune.data import render
from finetune.errors import Problem, UserError
from finetune.recipe import load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune.hardware import Hardware
    from finetune.plan import Plan
    from finetune.plan_launch import Sharding
    from finetune.recipe import Recipe
    from finetune.screen import Screen

SHOWN = 3
FASTER = 1.02  # times as many tokens/s of the whole run, from which a change is one
BY_AUTO = "the same numbers, but where it keeps gate and up in int8 (fp8 bases): gradients a hundredth off"
KINDS = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "buffers", "CUDA graphs")


class Change(NamedTuple):
    """Overrides, what they cost beside memory and time, and the plan with them."""

    overrides: tuple[str, ...]
    cost: str
    plan: Plan


class Asked(NamedTuple):
    """What `finetune plan` was asked, beside the recipe."""

    gpu: str | None
    gpus: int | None
    price: float | None
    """Of a GPU for an hour, in any currency."""
    config: str | None
    """An accelerate config, by name or file; its number of processes is taken where `gpus` is not given."""


def run(recipe: Recipe, overrides: list[str], screen: Screen, asked: Asked) -> tuple[Plan, list[Change]]:
    """Plan a recipe and its cheapest changes, and print both.

    Args:
        overrides: those the recipe was loaded with.

    Raises:
        UserError: what the recipe or the command line has wrong, or a run would refuse.
    """
    # What takes as long as the renderer does to begin, beside which no CPU is to be timed
    imported = "torch" in sys.modules
    if not imported:
        render.start()
    config = launch.find(asked.config) if asked.config else None
    if config and asked.gpu:
        on_gpus(config)
    elif config:  # the machine is this one
        launch.check(config)
    by, count = plan_launch.of_config(config, asked.gpus) if config else (None, asked.gpus)
    if config and not asked.gpus and not asked.gpu and hardware.detect().device == "cpu":
        machine, processes = plan.planned_machine(None, None)[0], count or 1
        machine = replace(machine, memory_gib=machine.memory_gib / processes)  # what one of them may take
    else:
        machine, processes = plan.planned_machine(asked.gpu, count)
    rate = plan.cpu_rate(recipe) / processes if machine.device == "cpu" else None
    if imported:
        render.start()
    made = plan.make(recipe, machine, processes, rate, by)
    found = changes(recipe, overrides, made, rate, by)
    show(screen, recipe, made, found, asked.price)
    return made, found


def on_gpus(config: Path) -> None:
    """Refuse a config for the CPU where the plan is of a GPU (exit 2)."""
    if launch_config.read(config).get("use_cpu") is True:
        what, fix = "this launch is for the CPU, and a GPU is to be planned", "ddp_8; or without --gpu"
        raise UserError(Problem(what, "--accelerate", str(config), found="use_cpu: true", fix=fix))


def changes(
    recipe: Recipe,
    overrides: list[str],
    now: Plan,
    cpu_rate: float | None = None,
    by: Sharding | None = None,
) -> list[Change]:
    """The cheapest changes, three at most: those that make it fit, in the order of the time they take; or if
    it fits, those that make it faster, the fastest first."""
    found, tried = [], set[tuple[str, ...]]()
    for change, cost in candidates(recipe, now):
        if change in tried:
            continue
        tried.add(change)
        try:
            changed = load(recipe.origin.path, [*overrides, *change])
            made = plan.make(changed, now.machine, now.processes, cpu_rate, by)
        except UserError:
            continue  # a run would refuse it
        taken = made.refused in ("", now.refused)  # what is refused already may still be made to fit
        taken &= evaluation_fits(recipe, made) or not evaluation_fits(recipe, now)
        if made.fits and taken and (not now.fits or _faster(now, made)):
            found.append(Change(change, "; ".join((cost, *beside(change, now, made))), made))
    found.sort(key=lambda one: (-_rate(one.plan), one.plan.peak))
    enough = {one.overrides[0] for one in found if len(one.overrides) == 1}
    return [one for one in found if len(one.overrides) == 1 or not enough & set(one.overrides)][:SHOWN]


def beside(change: tuple[str, ...], now: Plan, made: Plan) -> Iterator[str]:
    """What else comes with a change: another launch or base by `auto`, other steps, the CPU's memory."""
    if made.by.name != now.by.name:
        yield f"{made.by.name or 'one process'} in place of {now.by.name or 'one process'}"
    before, after = (plan.choices["base"].value for plan in (now, made))
    if before != after and not any(one.startswith(("speed.base", "adapter.type")) for one in change):
        yield f"the base in {after}, not {before}"
    if made.steps != now.steps and made.steps:
        yield f"{made.steps:,} steps"
    elif abs(made.step_tokens / (now.step_tokens or 1) - 1) > 0.02:
        yield f"a step of {made.step_tokens:,.0f} tokens, not {now.step_tokens:,.0f}"
    if made.host > now.host:
        yield f"{made.host * made.processes:,.0f} GiB of the CPU's memory"


def evaluation_fits(recipe: Recipe, made: Plan) -> bool:
    """Whether the held-out rows can be scored; also where there are none."""
    scored = plan_notes.evaluates(recipe.data, recipe.eval)
    return not scored or sum(made.phases["evaluation"].values()) <= made.usable


def _faster(now: Plan, made: Plan) -> bool:
    return _rate(made) > FASTER * (_rate(now) or float("inf"))


def _rate(made: Plan) -> float:
    """Tokens/s of the run as a whole, what compiling takes at its start included if its steps are known."""
    steps = (made.steps or 0) * (made.step_seconds or 0.0)
    return (made.tokens_per_second or 0.0) * (steps / made.seconds if made.seconds else 1.0)


def candidates(recipe: Recipe, now: Plan) -> Iterator[tuple[tuple[str, ...], str]]:
    """Overrides that may help, each with what it costs beside memory and time."""
    speed, kind, per_device = recipe.speed, recipe.adapter.type, now.batch.per_device
    less: list[tuple[str, str]] = []
    if kind == "full":
        less.append(
            ("adapter.type=lora", "an adapter is trained, not every weight; its learning rate is higher")
        )
        less.append(("train.optim=adamw_torch_8bit", "steps a few percent off those of fp32 state"))
        less.append(("speed.offload=optimizer", "steps on the CPU"))
    elif now.choices["base"].value not in adapter_types.QUANTISED:
        less.append(("speed.base=fp8", "weights and products rounded to fp8"))
        if (quantised := f"q{kind}") in adapter_types.all_types():
            less.append((f"adapter.type={quantised}", "the base rounded to 4 bits"))
    elif now.choices["base"].value == "fp8" and speed.base == "fp8":
        less.append(("speed.base=nf4", "the base rounded to 4 bits"))
    if now.choices["CUDA graphs"].value == "on":
        less.append(("speed.compile=default", "the same numbers, without CUDA graphs"))
    if getattr(recipe.adapter, "lora_dropout", 0.0):
        less.append(("adapter.lora_dropout=0.0", "no dropout"))
    if now.choices["recompute"].value == "none" or speed.recompute not in ("auto", "all"):
        less += [("speed.recompute=auto", BY_AUTO), ("speed.recompute=all", "the same numbers")]
    elif speed.recompute == "auto" and not now.fits:
        less.append(("speed.recompute=all", "the same numbers"))
    if speed.offload in ("auto", "none") and now.machine.device == "cuda":
        less.append(("speed.offload=activations", "the same numbers"))
    for size in {1, per_device // 2} - {0, per_device} if _may_split(recipe, now) else ():
        less.append((f"train.per_device_train_batch_size={size}", "the same steps, in more passes"))
    if recipe.data.max_length >= 1024:
        length = recipe.data.max_length // 2
        less.append((f"data.max_length={length}", _shorter(recipe, length)))
    if now.fits:
        yield from (((change,), cost) for change, cost in [*less, *faster(recipe, now)])
        return
    yield from (((change,), cost) for change, cost in less)
    costs = dict(less)
    for first in ("speed.recompute=all", "speed.offload=activations"):
        for second in less:
            if first in costs and second[0].partition("=")[0] != first.partition("=")[0]:
                yield (first, second[0]), "; ".join(dict.fromkeys((costs[first], second[1])))


def _may_split(recipe: Recipe, now: Plan) -> bool:
    """Whether other numbers of rows at once are worth planning. On a CPU they are for what does not fit:
    packing and rows apart were measured slower there, not faster (benchmarks/ladder.json: 0.69, 0.53)."""
    searched = recipe.train.per_device_train_batch_size == "auto"
    return not searched and (now.machine.device == "cuda" or not now.fits)


def _shorter(recipe: Recipe, length: int) -> str:
    """What a shorter `data.max_length` does to the rows."""
    data = recipe.data.model_copy(update={"max_length": length})
    rows = plan_rows.rows_of(data, recipe.model, 1)
    if rows is None:
        return "rows that are longer are dropped, or their prompts cut; how many is not known"
    return plan_rows.too_long(rows, data)[0] or "no row is longer"


def faster(recipe: Recipe, now: Plan) -> Iterator[tuple[str, str]]:
    """Overrides that may make a recipe that fits faster."""
    speed, per_device = recipe.speed, now.batch.per_device
    if speed.recompute != "auto":
        yield "speed.recompute=auto", BY_AUTO
    compiles, why = now.choices["compile"]
    if compiles == "off" and now.machine.device == "cuda":
        why = f"; {why.removeprefix('auto: ')}" if "not measured" in why else ""
        yield "speed.compile=true", f"about {plan.COMPILE_SECONDS} s more at the start{why}"
    if speed.compile == "default":
        yield "speed.compile=true", "the same numbers, as CUDA graphs where they pay"
    if now.choices["compile"].value == "on":
        yield "speed.compile=false", f"{plan.COMPILE_SECONDS} s less at the start"
    if speed.fused is False:
        yield "speed.fused=auto", "the same numbers"
    if speed.offload not in ("auto", "none"):
        yield "speed.offload=auto", BY_AUTO
    if not recipe.data.packing and not recipe.data.streaming and now.machine.device == "cuda":
        yield "data.packing=true", "several rows in one"
    if _may_split(recipe, now) and now.batch.accumulation % 2 == 0:
        yield f"train.per_device_train_batch_size={2 * per_device}", "the same steps, in fewer passes"
    if adapter_types.find(recipe.adapter.type).sets.get("use_dora"):
        yield f"adapter.type={recipe.adapter.type.replace('dora', 'lora')}", "no trained magnitudes"


def show(screen: Screen, recipe: Recipe, now: Plan, found: list[Change], price: float | None) -> None:
    """Three tables and a sentence."""
    screen.say("", headline(recipe, now))
    taken = [kind for kind in KINDS if any(kind in phase for phase in now.phases.values())]
    rows = [
        [name, *(_gib(kinds.get(kind)) for kind in taken), _gib(sum(kinds.values()))]
        for name, kinds in now.phases.items()
    ]
    screen.table("memory of one device, GiB", ("phase", *taken, "all"), rows)
    screen.table("time", ("what", "planned"), list(times(now, price)))
    chosen = [(name, choice.value, choice.reason) for name, choice in now.choices.items()]
    screen.table("would be used", ("what", "choice", "why"), chosen)
    what = "faster" if now.fits else "so that it fits"
    screen.table(what, ("change", "peak GiB", "tokens/s", "its price"), [_row(one, now) for one in found])
    if not found:
        none = (
            "no single change of this recipe is much faster" if now.fits else "no change found; a larger GPU"
        )
        screen.say(none)
    for note in now.notes:
        screen.say(f"note: {note}")


def headline(recipe: Recipe, now: Plan) -> str:
    """One sentence: does it fit, how fast, how long."""
    verdict = "fits" if now.fits else "does not fit"
    if now.fits and not evaluation_fits(recipe, now):
        verdict = "training fits, evaluation does not"
    verdict = f"a run would refuse its rows; {verdict}" if now.refused else verdict
    text = (
        f"{recipe.adapter.type} on {recipe.model.name}, {now.processes} x {_device(now.machine)}: {verdict}, "
    )
    text += f"{now.peak:.1f} of {now.usable:.1f} GiB"
    if now.machine.host_gib is not None and now.host * now.processes > now.machine.host_gib:
        text += f", {now.host * now.processes:.1f} of {now.machine.host_gib:.1f} GiB of the CPU's memory"
    if now.tokens_per_second:
        text += f"; {now.tokens_per_second:,.0f} tokens/s"
    return f"{text}; {duration(now.seconds)} of training" if now.seconds else text


def times(now: Plan, price: float | None) -> Iterator[tuple[str, str]]:
    """Rows of the table of time, energy and cost."""
    batch = now.batch
    split = f"{batch.effective} sequences: {batch.per_device} at once, {batch.accumulation} passes"
    yield "a step", f"{split}, {now.processes} process{'es' * (now.processes > 1)}"
    yield "trained", f"{now.trained:,} numbers"
    if now.step_seconds is None:
        yield "seconds a step", "not known"
    else:
        shares = ", ".join(
            f"{name} {value / now.step_seconds:.0%}" for name, value in now.parts.items() if value
        )
        yield "seconds a step", f"{now.step_seconds:.3f} ({shares})"
        yield "tokens/s", f"{now.tokens_per_second:,.0f}"
    size, link = now.sent
    if link:
        waits = now.parts.get("communication", 0.0)
        text = f"{size / 1e9:,.3g} GB a step from each, {size / link:.3f} s at {link / 1e9:,.0f} GB/s"
        name = now.by.name + (f", {now.by.sharing} share each row" if now.by.sharing > 1 else "")
        yield "between GPUs", f"{name}: {text}; {waits:.3f} s not beside computing"
    yield "rates", now.source
    yield "steps", f"{now.steps:,}" if now.steps is not None else "not known"
    if now.seconds:
        yield (
            "training",
            f"{duration(now.seconds)}, without evaluation and saving, as energy and cost",
        )
        hours = now.seconds * now.processes / 3600
        gpu = gpus.of_device(now.machine.name) if now.machine.device == "cuda" else None
        if gpu:
            yield "energy", f"{hours * gpu.watts / 1000:,.2f} kWh, the GPUs at their limit of {gpu.watts} W"
        if price is not None:
            yield "cost", f"{hours * price:,.2f}: {hours:,.2f} hours of a device at {price:g}"
    elif price is not None and now.tokens_per_second:
        hours = 1e9 / now.tokens_per_second * now.processes / 3600
        text = f"{hours * price:,.2f} for a billion tokens, for the steps are not known"
        yield "cost", f"{text}: {hours:,.2f} hours of a device at {price:g}"
    elif price is not None:
        yield "cost", "not known"


def _row(one: Change, now: Plan) -> list[str]:
    made, speeds = one.plan, (now.tokens_per_second, one.plan.tokens_per_second)
    rate = "not known"
    if speeds[0] and speeds[1]:
        rate = f"{speeds[1]:,.0f} ({speeds[1] / speeds[0] - 1:+.0%})"
    return [" ".join(one.overrides), f"{made.peak:.1f} ({made.peak - now.peak:+.1f})", rate, one.cost]


def _gib(value: float | None) -> str:
    return "" if not value else f"{value:.2f}" if value >= 0.01 else "0.00"


def _device(machine: Hardware) -> str:
    return f"{machine.name.removeprefix('NVIDIA ')} {machine.memory_gib:.0f} GiB"


def duration(seconds: float) -> str:
    """90 s, 12 min, 3 h 20 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60:02} min"
