"""Suggest changes that make a recipe fit or run faster. Each change is planned again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from finetune.core.errors import UserError
from finetune.planning import dataset_estimate, plan_notes, planner
from finetune.planning.plan import COMPILE_SECONDS, Plan
from finetune.planning.sharding_cost import Sharding
from finetune.recipe import adapter_types
from finetune.recipe.loader import load
from finetune.recipe.schema import Recipe

SHOWN = 3
FASTER = 1.02  # factor by which a suggestion must raise the tokens/s of the whole run
SAME = "none: the same results"
BY_AUTO = (
    "none, but on fp8 base models auto may store MLP activations in int8 (gradients differ by about 1 %)"
)


class Change(NamedTuple):
    """Overrides, their trade-off apart from memory and time, and the plan with them."""

    overrides: tuple[str, ...]
    cost: str
    plan: Plan


def changes(
    recipe: Recipe,
    overrides: list[str],
    now: Plan,
    cpu_rate: float | None = None,
    by: Sharding | None = None,
) -> list[Change]:
    """Return at most three changes that make a recipe fit, or that make it faster if it fits already.

    The fastest change comes first.
    """
    found, tried = [], set[tuple[str, ...]]()
    for change, cost in candidates(recipe, now):
        if change in tried:
            continue
        tried.add(change)
        try:
            changed = load(recipe.origin.path, [*overrides, *change])
            made = planner.make(changed, now.machine, now.processes, cpu_rate, by)
        except UserError:
            continue  # a run would refuse it
        taken = made.refused in ("", now.refused)  # data that a run refuses anyway does not rule a change out
        taken &= evaluation_fits(recipe, made) or not evaluation_fits(recipe, now)
        if made.fits and taken and (not now.fits or _faster(now, made)):
            found.append(Change(change, "; ".join((cost, *side_effects(change, now, made))), made))
    found.sort(key=lambda one: (-_rate(one.plan), one.plan.peak))
    enough = {one.overrides[0] for one in found if len(one.overrides) == 1}
    return [one for one in found if len(one.overrides) == 1 or not enough & set(one.overrides)][:SHOWN]


def side_effects(change: tuple[str, ...], now: Plan, made: Plan) -> Iterator[str]:
    """Yield the side effects of a change, such as another launch, other steps or the use of CPU memory."""
    if made.by.name != now.by.name:
        yield f"{made.by.name or 'one process'} instead of {now.by.name or 'one process'}"
    before, after = (plan.choices["quantization"].value for plan in (now, made))
    if before != after and not any(one.startswith(("model.quantization", "adapter.type")) for one in change):
        yield f"the base model in {after} instead of {before}"
    if made.steps != now.steps and made.steps:
        yield f"{made.steps:,} steps"
    elif abs(made.step_tokens / (now.step_tokens or 1) - 1) > 0.02:
        yield f"{made.step_tokens:,.0f} tokens per step instead of {now.step_tokens:,.0f}"
    if made.host > now.host:
        yield f"{made.host * made.processes:,.0f} GiB of CPU memory"


def evaluation_fits(recipe: Recipe, made: Plan) -> bool:
    """Return whether evaluation fits in memory. True if the run evaluates nothing."""
    scored = plan_notes.evaluates(recipe.data, recipe.eval)
    return not scored or sum(made.phases["evaluation"].values()) <= made.usable


def _faster(now: Plan, made: Plan) -> bool:
    return _rate(made) > FASTER * (_rate(now) or float("inf"))


def _rate(made: Plan) -> float:
    """Return tokens/s of the whole run, including compilation if the number of steps is known."""
    steps = (made.steps or 0) * (made.step_seconds or 0.0)
    return (made.tokens_per_second or 0.0) * (steps / made.seconds if made.seconds else 1.0)


def candidates(recipe: Recipe, now: Plan) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield overrides that may help, each with its trade-off apart from memory and time."""
    speed, kind, per_device = recipe.speed, recipe.adapter.type, now.batch.per_device
    less: list[tuple[str, str]] = []
    if kind == "full":
        less.append(("adapter.type=lora", "trains only an adapter, which needs a higher learning rate"))
        less.append(("train.optim=adamw_torch_8bit", "steps differ by a few percent from fp32 state"))
        less.append(("speed.offload=optimizer", "the optimizer runs on the CPU"))
    elif now.choices["quantization"].value not in adapter_types.QUANTIZED:
        less.append(("model.quantization=fp8", "rounds weights and matrix multiplications to fp8"))
        if (quantized := f"q{kind}") in adapter_types.all_types():
            less.append((f"adapter.type={quantized}", "rounds the base model to 4 bits"))
    elif now.choices["quantization"].value == "fp8" and recipe.model.quantization == "fp8":
        less.append(("model.quantization=nf4", "rounds the base model to 4 bits"))
    if now.choices["CUDA graphs"].value == "on":
        less.append(("speed.compile=default", "the same results, without CUDA graphs"))
    if getattr(recipe.adapter, "lora_dropout", 0.0):
        less.append(("adapter.lora_dropout=0.0", "no dropout"))
    key, again = "speed.activation_checkpointing", speed.activation_checkpointing
    if now.choices["activation checkpointing"].value == "none" or again not in ("auto", "full"):
        less += [(f"{key}=auto", BY_AUTO), (f"{key}=full", SAME)]
    elif again == "auto" and not now.fits:
        less.append((f"{key}=full", SAME))
    if speed.offload in ("auto", "none") and now.machine.device == "cuda":
        less.append(("speed.offload=activations", SAME))
    for size in {1, per_device // 2} - {0, per_device} if _may_split(recipe, now) else ():
        less.append((f"train.per_device_train_batch_size={size}", "the same steps, with more accumulation"))
    if recipe.data.max_length >= 1024:
        length = recipe.data.max_length // 2
        less.append((f"data.max_length={length}", _shorter(recipe, length)))
    if now.fits:
        yield from (((change,), cost) for change, cost in [*less, *faster(recipe, now)])
        return
    yield from (((change,), cost) for change, cost in less)
    yield from _pairs(less)


def _pairs(less: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield pairs of overrides that save memory, each with both trade-offs."""
    costs = dict(less)
    for first in ("speed.activation_checkpointing=full", "speed.offload=activations"):
        for second in less:
            if first in costs and second[0].partition("=")[0] != first.partition("=")[0]:
                yield (first, second[0]), "; ".join(dict.fromkeys((costs[first], second[1])))


def _may_split(recipe: Recipe, now: Plan) -> bool:
    """Return whether other micro-batch sizes are worth a plan.

    On a CPU they only help a recipe that does not fit. They were measured slower there
    (benchmarks/ablation.json).
    """
    searched = recipe.train.per_device_train_batch_size == "auto"
    return not searched and (now.machine.device == "cuda" or not now.fits)


def _shorter(recipe: Recipe, length: int) -> str:
    """Describe the effect of a shorter `data.max_length` on the rows."""
    data = recipe.data.model_copy(update={"max_length": length})
    rows = dataset_estimate.rows_of(data, recipe.model, 1)
    if rows is None:
        return "an unknown number of examples is longer, and dropped or truncated"
    return dataset_estimate.too_long(rows, data)[0] or "none: no example is longer"


def faster(recipe: Recipe, now: Plan) -> Iterator[tuple[str, str]]:
    """Yield overrides that may make a recipe faster that already fits."""
    speed, per_device = recipe.speed, now.batch.per_device
    if speed.activation_checkpointing != "auto":
        yield "speed.activation_checkpointing=auto", BY_AUTO
    compiles, why = now.choices["compile"]
    if compiles == "off" and now.machine.device == "cuda":
        why = f"; {why.removeprefix('auto: ')}" if "not measured" in why else ""
        yield "speed.compile=true", f"about {COMPILE_SECONDS} s more before the first step{why}"
    if speed.compile == "default":
        yield "speed.compile=true", "the same results, with CUDA graphs if they are faster"
    if now.choices["compile"].value == "on":
        yield "speed.compile=false", f"{COMPILE_SECONDS} s less before the first step"
    if speed.fused is False:
        yield "speed.fused=auto", SAME
    if speed.offload not in ("auto", "none"):
        yield "speed.offload=auto", BY_AUTO
    if not recipe.data.packing and not recipe.data.streaming and now.machine.device == "cuda":
        yield "data.packing=true", "fewer steps, each with several examples per sequence"
    if _may_split(recipe, now) and now.batch.accumulation % 2 == 0:
        yield f"train.per_device_train_batch_size={2 * per_device}", "the same steps, with less accumulation"
    if adapter_types.find(recipe.adapter.type).sets.get("use_dora"):
        yield (
            f"adapter.type={recipe.adapter.type.replace('dora', 'lora')}",
            "LoRA instead of DoRA: the magnitudes do not train",
        )
