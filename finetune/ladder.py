"""A ladder of optimisations, as data: `recipes/ladder.yaml`. What each rung sets, needs and costs.

`measure:` how runs are made and judged; `baseline:` what the recipe runs without every rung; `rungs:` in the
order in which they are stacked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from finetune import recipe_errors, strict_yaml
from finetune.errors import Problem, UserError, nearest
from finetune.sections import Section
from finetune.upstream import installed

if TYPE_CHECKING:
    from finetune.hardware import Hardware

OURS = "default"  # a rung's value that takes the baseline's away: what the recipe or `auto` says holds again
BATCH = ("train.effective_batch_size", "train.per_device_train_batch_size")
PRECISION = Literal["no", "bf16", "fp16"]


class Measure(Section):
    """How runs are made and judged."""

    steps: int = Field(default=6, ge=2)
    """Optimizer steps of each run."""
    warm_up: int = Field(default=2, ge=1)
    """First steps that do not count."""
    repeats: int = Field(default=2, ge=1)
    """Runs of each variant, interleaved with those of the others."""
    min_gain: float = Field(default=0.01, ge=0)
    """A smaller gain is none, however quiet the machine."""
    loss_band: float = Field(default=0.02, gt=0)
    """How far a curve may be from the baseline's: mean distance over mean loss."""
    held_out_band: float = Field(default=0.05, gt=0)
    """How much worse the held-out loss may be, relative, of a rung by which other rows meet in a batch."""
    held_out_rows: int = Field(default=16, ge=0)
    """Rows of `data.validation` that the first run of a variant is evaluated on."""


class Needs(Section):
    """What the machine must have."""

    device: Literal["cpu", "cuda"] | None = None
    capability: float | None = None
    """Of a GPU: 8.9 is Ada."""
    package: str | None = None
    why: str = ""
    """Said after what is missing."""


class Gpu(Section):
    """Rows of benchmarks/gpu.json between which this optimisation is the only difference."""

    on: str
    off: str


class Rung(Section):
    name: str = Field(pattern=r"[a-z0-9_]+")
    kind: str = Field(pattern=r"[a-z]+")
    """The folder of its runs: results/<kind>/<name>_rank<r>."""
    what: str
    """What it does, in a sentence."""
    cost: str = ""
    off: str = ""
    """How to switch it off."""
    source: str = ""
    set: dict[str, Any] = Field(default_factory=dict)
    """Recipe keys; `default`: what the baseline set is taken away."""
    mixed_precision: PRECISION | None = None
    """The launch's."""
    same_tokens: bool = False
    """The batch sizes become what gives a step the baseline's tokens in full rows."""
    on: list[str] = Field(default_factory=list)
    """Rungs it stands on: alone it is measured against these."""
    needs: Needs = Needs()
    gain: Literal["speed", "memory"] = "speed"
    """What it is for; one for memory is kept if the peak falls and tokens/s do not, beyond noise."""
    gate: Literal["curve", "held_out"] = "curve"
    """What is held against the baseline: losses step by step, or, where other rows meet in a batch, the
    held-out loss."""
    noop: str = ""
    """Why it changes nothing today, or can't be had: named, not measured."""
    gpu: Gpu | None = None


class Baseline(Section):
    mixed_precision: PRECISION | None = None
    set: dict[str, Any] = Field(default_factory=dict)


class Ladder(Section):
    measure: Measure = Measure()
    baseline: Baseline
    rungs: list[Rung]

    def rung(self, name: str) -> Rung:
        return next(rung for rung in self.rungs if rung.name == name)


class Variant(NamedTuple):
    """A recipe with some rungs."""

    mixed_precision: str | None
    values: dict[str, Any]
    """By dotted key."""

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={json.dumps(value)}" for key, value in self.values.items()]


def read(path: Path) -> Ladder:
    """A ladder file.

    Raises:
        UserError: it can't be read, or what is wrong in it, with its place (exit 2).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(Problem("no such ladder", where=str(path), found=error.strerror or "")) from error
    document = strict_yaml.parse(text, str(path))
    if not isinstance(document.value, dict) or document.problems:
        wrong = document.problems or [Problem("a ladder is a mapping with `rungs`", where=str(path))]
        raise UserError(*wrong)
    try:
        ladder = Ladder.model_validate(document.value)
    except ValidationError as error:
        raise UserError(*recipe_errors.explain(error, document.value, document.where, {})) from error
    known, problems = set[str](), list[Problem]()
    for rung in ladder.rungs:
        for below in rung.on:
            if below not in known:
                fix = nearest(below, known) or "a rung that stands before it"
                what = f"rung {rung.name}: `on` names no earlier rung"
                problems.append(Problem(what, where=str(path), found=below, fix=fix))
        if rung.name in known:
            problems.append(Problem("two rungs have one name", where=str(path), found=rung.name))
        known.add(rung.name)
    if problems:
        raise UserError(*problems)
    return ladder


def baseline(ladder: Ladder) -> Variant:
    """Everything off."""
    return Variant(ladder.baseline.mixed_precision, dict(ladder.baseline.set))


def add(variant: Variant, rung: Rung, rows: int | None = None) -> Variant:
    """A variant with one more rung; `rows` of a step are for a rung with `same_tokens`, and what the recipe
    has in a forward pass may not divide them."""
    same = dict(zip(BATCH, (rows, None), strict=True)) if rung.same_tokens and rows else {}
    values = {**variant.values, **same, **rung.set}
    values = {key: value for key, value in values.items() if value != OURS}
    return Variant(rung.mixed_precision or variant.mixed_precision, values)


def keys(rung: Rung) -> list[str]:
    """All that a rung sets."""
    return [*rung.set, *(BATCH if rung.same_tokens else ())]


def below(ladder: Ladder, rung: Rung) -> Variant:
    """What a rung is measured against alone: the baseline, with the rungs it stands on."""
    variant = baseline(ladder)
    for name in rung.on:
        variant = add(variant, ladder.rung(name))
    return variant


def missing(needs: Needs, machine: Hardware) -> str:
    """What the machine lacks for a rung; the empty string if nothing."""
    found, (major, minor) = "", machine.capability
    if needs.device == "cuda" and machine.device == "cpu":
        found = "no GPU here"
    elif needs.device == "cpu" and machine.device != "cpu":
        found = "only on a CPU"
    elif needs.capability and machine.device == "cuda" and major + minor / 10 < needs.capability:
        found = f"compute capability {needs.capability:g}; {machine.name} has {major}.{minor}"
    elif needs.package and not installed(needs.package):
        found = f"{needs.package} is not installed"
    return f"{found}: {needs.why}" if found and needs.why else found
