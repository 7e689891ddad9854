"""An optimised recipe against a baseline: the same seed, runs that take turns, and limits that must hold
(`scripts/validate_optimizations.py`).

results/ab/<baseline>-against-<optimised>/   each run, an ordinary run folder; ab.json, ab.md
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import markdown, safe_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.experiments.runner import measured_run, varied_keys
from finetune.hardware import detection
from finetune.launch import launcher
from finetune.preflight import checker, choice_checks
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from finetune.core.console import Console
    from finetune.recipe.schema import Recipe

HELD_OUT_ROWS = 64


class Limits(NamedTuple):
    """What must hold."""

    speedup: float
    """At least, of tokens/s."""
    loss: float
    """At most, of the optimised loss over the baseline's; a lower one is none too low."""
    relative: bool = True
    """Whether `loss` is a share of the baseline's, or nats a token."""
    memory_gib: float | None = None
    """At most, of the optimised run's peak on one device."""


class Asked(NamedTuple):
    baseline: str
    optimised: str
    overrides: list[str]
    """Of both."""
    accelerate: tuple[str | None, str | None]
    """Launch configs of baseline and optimised."""
    folder: Path
    steps: int = 20
    warm_up: int = 5
    repeats: int = 3
    price: float | None = None
    """Of one device for an hour."""


class Check(NamedTuple):
    what: str
    found: str
    limit: str
    ok: bool


@measured_run.stoppable()
def run(asked: Asked, limits: Limits, screen: Console) -> dict[str, Any]:
    """Measure both, print the table and the checks; leaves ab.json and ab.md.

    Raises:
        UserError: a recipe is wrong (2), a run fails, or a limit does not hold (5).
        Stopped: by a signal; the same command goes on.
    """
    base = look(asked)
    names = (Path(asked.baseline).stem, Path(asked.optimised).stem)
    place = asked.folder / "ab" / f"{names[0]}-against-{names[1]}"
    run_folder.refuse_links(asked.folder)
    runs = measure(asked, base, place, screen)
    sides = [measured_run.summary(group) for group in runs]
    noise = measured_run.noise([side["all"] for side in sides])
    checks = judge(sides, limits)
    found = {
        "baseline": asked.baseline,
        "optimised": asked.optimised,
        "date": measured_run.dates([*runs[0], *runs[1]]),
        "machine": runs[0][0]["machine"],
        "sides": sides,
        "noise": noise,
        "checks": [check._asdict() for check in checks],
    }
    RunFolder(place).write("ab.json", found)
    rows = list(table(sides, int(found["machine"]["processes"]), asked.price))
    text = markdown.table(("", "baseline", "optimised"), rows)
    safe_files.write_text(place, "ab.md", f"{text}\n")
    title = f"{asked.baseline} against {asked.optimised}"
    screen.table(title, ("", "baseline", "optimised"), rows)
    verdicts = [(c.what, c.found, c.limit, "holds" if c.ok else "DOES NOT HOLD") for c in checks]
    said = "noise not known, with one run of each; " if noise is None else f"one run's noise {noise:.1%}; "
    screen.table(f"{said}limits", ("what", "found", "limit", ""), verdicts)
    screen.say("", f"wrote {place}/ab.md and ab.json")
    broken = [Problem(f"{c.what} does not hold", found=c.found, expected=c.limit) for c in checks if not c.ok]
    if broken:
        raise UserError(*broken, code=Exit.TRAINING)
    return found


def look(asked: Asked) -> Recipe:
    """Whatever is wrong with what was asked for, before anything runs; the baseline's recipe.

    Raises:
        UserError: no step would count; a recipe or a launch config is wrong (2, or 3 as `finetune check`).
    """
    if asked.warm_up >= asked.steps:
        found, expected = f"--steps {asked.steps} --warm-up {asked.warm_up}", "--warm-up below --steps"
        raise UserError(Problem("no step would count", found=found, expected=expected))
    for config in filter(None, asked.accelerate):
        launcher.check(launcher.find(config))
    recipes = [load_recipe(path, asked.overrides) for path in (asked.baseline, asked.optimised)]
    for path, recipe in zip((asked.baseline, asked.optimised), recipes, strict=True):
        short = measured_run.length(asked.steps, asked.warm_up, recipe.adapter)
        checker.run(load_recipe(path, [*asked.overrides, *short]))
        choice_checks.pinned(recipe)
    before, after = [
        {"model": measured_run.model_of(one.model), "checkpoints": measured_run.saves(one.train)}
        for one in recipes  # as they are: in the runs nothing is saved
    ]
    comparable(before, after, f"{asked.baseline} and {asked.optimised}", "key=value, which is for both")
    return recipes[0]


def comparable(a: dict[str, str], b: dict[str, str], where: str, fix: str) -> None:
    """Of one machine, model and checkpoint frequency, or it is said what is not (2)."""
    if apart := measured_run.not_comparable(a, b):
        raise UserError(Problem("NOT COMPARABLE", where=where, found="; ".join(apart), fix=fix))


def measure(asked: Asked, base: Recipe, place: Path, screen: Console) -> list[list[dict[str, Any]]]:
    """Figures of the runs of each side, which take turns and change who begins.

    Raises:
        UserError: a run fails (5).
    """
    held_out = measured_run.cut_held_out(base.data.validation, place, HELD_OUT_ROWS, screen)
    cpu = detection.detect().device == "cpu"
    sides: list[list[dict[str, Any]]] = [[], []]
    first: dict[str, str] = {}
    for number in range(1, asked.repeats + 1):
        for side in (0, 1) if number % 2 else (1, 0):
            path = (asked.baseline, asked.optimised)[side]
            adapter = load_recipe(path, asked.overrides).adapter
            values = [*asked.overrides, *measured_run.length(asked.steps, asked.warm_up, adapter)]
            begins, fraction = number == 1, base.data.validation_fraction
            alike = {"train.seed": base.train.seed, "data.validation": held_out if begins else None}
            alike |= {"data.validation_fraction": fraction if begins and not held_out else None}
            folder = place / f"{('baseline', 'optimised')[side]}-{number}"
            config = asked.accelerate[side]
            job = measured_run.Job(
                path,
                [*values, *varied_keys.overrides(alike)],
                folder,
                accelerate=str(launcher.find(config)) if config else None,
            )
            fresh = measured_run.make(job, cpu=cpu)
            found = measured_run.figures(folder, asked.warm_up)
            if found["failed"]:
                problem = Problem("a run failed", where=f"{folder}.log", found=found["failed"])
                raise UserError(problem, code=Exit.TRAINING)
            first = first or found["machine"]
            comparable(first, found["machine"], str(folder), "--output another folder")
            rate = f"{found['tokens_per_second']:,.0f} tokens/s"
            screen.say(f"{folder.name}: {'' if fresh else 'kept: '}{rate}")
            sides[side].append(found)
    return sides


def judge(sides: list[dict[str, Any]], limits: Limits) -> list[Check]:
    """Each limit against what was measured; losses by the validation examples, or else by the last steps."""
    before, after = sides
    ratio = after["tokens_per_second"] / before["tokens_per_second"]
    least = f"at least {limits.speedup:g} times"
    checks = [Check("speed-up", f"{ratio:.2f} times the tokens/s", least, ratio >= limits.speedup)]
    known = before["held_out"] is not None and after["held_out"] is not None
    losses = [side["held_out"] if known else last(side["losses"]) for side in sides]
    more = (losses[1] - losses[0]) / (losses[0] if limits.relative else 1.0)
    shown, allowed = (
        (f"{more:+.2%}", f"{limits.loss:.2%}") if limits.relative else (f"{more:+.4f}", f"{limits.loss:g}")
    )
    name = "validation loss" if known else "training loss, last quarter of the steps"
    found = f"{losses[0]:.4f} -> {losses[1]:.4f} ({shown})"
    checks.append(Check(name, found, f"at most {allowed} higher", more <= limits.loss))
    if limits.memory_gib is not None:
        peak = after["memory_gib"]
        most = f"at most {limits.memory_gib:g} GiB"
        checks.append(Check("peak memory", f"{peak:.2f} GiB", most, peak <= limits.memory_gib))
    return checks


def last(losses: list[float]) -> float:
    """The mean loss of the last quarter of the steps."""
    return statistics.mean(losses[-max(1, len(losses) // 4) :])


def table(sides: list[dict[str, Any]], processes: int, price: float | None) -> list[list[str]]:
    """The A/B table: what was measured of each side."""

    def row(name: str, form: str, values: list[Any]) -> list[str]:
        return [name, *("-" if value is None else form.format(value) for value in values)]

    def of(key: str) -> list[Any]:
        return [side[key] for side in sides]

    rows = [
        row("tokens/s", "{:,.0f}", of("tokens_per_second")),
        row("s a step", "{:.3g}", of("step_seconds")),
        row("first step, s", "{:.1f}", of("first_step_seconds")),
        row("peak GiB of a device", "{:.2f}", of("memory_gib")),
        row("MFU", "{:.1%}", of("mfu")),
        row("training loss, last quarter", "{:.4f}", [last(side["losses"]) for side in sides]),
        row("validation loss", "{:.4f}", of("held_out")),
        row("hours for a billion tokens", "{:,.1f}", [1e9 / rate / 3600 for rate in of("tokens_per_second")]),
    ]
    if price is not None:
        cost = [1e9 / rate / 3600 * price * processes for rate in of("tokens_per_second")]
        rows.append(row(f"cost of that, {processes} x {price:g} an hour", "{:,.2f}", cost))
    return rows
