"""Measure each optimization on one recipe, alone and on top of the optimizations that helped:
`finetune ablate RECIPE --optimizations FILE`.

DIR/<kind>/<name>_rank<r>/<recipe>-alone-1    each run, an ordinary run folder (`runner/measured_run.py`)
                                  -under-1    of what it stands on, where no optimization alone is that
DIR/<recipe>/ladder.json, .md, .svg, .html    the table and the picture (`ablation_report.py`)
DIR/<recipe>/best.yaml                        the recipe with what helped

Runs of all variants take turns, in fresh processes. On the stack, each run of an optimization runs beside one
of the stack. An optimization stays in the stack if its gain exceeds the noise, its losses match the
baseline's within a band, and the validation examples exclude a cost above the limit. Runs that could change
only noise are skipped. The headline compares with the user's recipe. The same command resumes.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import safe_files, shipped_files
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError, in_one_line
from finetune.experiments.ablation import ablation_report, optimizations, verdict
from finetune.experiments.ablation.optimizations import Variant
from finetune.experiments.runner import kept_runs, measured_run, varied_keys
from finetune.experiments.runner.varied_keys import values_of
from finetune.hardware import detection
from finetune.launch import launcher
from finetune.preflight import checker, choice_checks
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from finetune.experiments.ablation.optimizations import Ladder, Rung
    from finetune.hardware.detection import Hardware

BUSY = 0.05  # noise of a run by the clock


class Asked(NamedTuple):
    """What was asked for."""

    path: str
    overrides: list[str]
    ladder: Path
    folder: Path


@dataclass
class Bench:
    """Where runs are made, and what they measured so far."""

    asked: Asked
    ladder: Ladder
    machine: Hardware
    screen: Console
    rank: str = ""
    held_out: str | None = None
    """File of a few validation examples; `None`: the recipe names none."""
    short: list[str] = field(default_factory=list)
    """Overrides that make a run one of a few steps."""
    rows: int | None = None
    """Of `train.effective_batch_size`, full, that have the baseline's tokens."""
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Figures of a variant's runs, by `key`."""
    strange: dict[str, str] = field(default_factory=dict)
    """Runs that are NOT COMPARABLE, and why."""
    rate: str = "tokens_per_second"
    """What gains are of."""
    latest: str = ""
    """The `key` of the variant that ran last."""
    kept_seconds: float = 0.0
    """Of runs that were there."""

    def of(self, variant: Variant) -> list[dict[str, Any]]:
        return self.groups.get(key(variant), [])

    def noise(self, figure: str) -> float | None:
        """One run's, relative."""
        whole = [
            [run[figure] for run in group if not run["failed"] and run[figure]]
            for group in self.groups.values()
        ]
        return measured_run.noise(whole)

    @property
    def scale(self) -> verdict.Scale:
        noise = {figure: self.noise(figure) for figure in (*measured_run.UNITS, "memory_gib")}
        return verdict.Scale(self.ladder.measure, self.rate, noise)

    def choose_rate(self) -> None:
        """A CPU that other work shares is judged by CPU seconds, if these are steadier than the clock."""
        clock, taken = (self.noise(f"tokens_per_{second}") for second in ("second", "cpu_second"))
        if self.machine.device == "cpu" and clock and taken is not None and clock > max(BUSY, taken):
            self.rate = "tokens_per_cpu_second"
            said = f"noise {clock:.0%} by the clock, {taken:.1%} by CPU seconds"
            self.screen.say(f"note: this machine is busy ({said}): gains are of tokens a CPU second")


def key(variant: Variant) -> str:
    return json.dumps(variant, sort_keys=True)


@measured_run.stoppable()
def run(asked: Asked, *, quiet: bool = False) -> dict[str, Any]:
    """Measure the optimizations; write table, picture, page and the best recipe.

    Returns:
        The content of ladder.json.

    Raises:
        UserError: a mistake in the recipe or the ablation file; results of another machine or recipe (2);
            the baseline can't be run (5).
        Stopped: by a signal; the same command goes on.
    """
    if launcher.launched():
        fix = f"finetune ablate {asked.path}"
        raise UserError(Problem("`ablate` starts its own processes; run it without a launcher", fix=fix))
    own = load_recipe(asked.path, asked.overrides)
    given = optimizations.read(asked.ladder)
    optimizations.check_values(given, own.adapter.type)
    steps = optimizations.of_type(given, own.adapter.type)
    checker.run(own)
    choice_checks.pinned(own)
    check_baseline(asked, steps)
    for config in optimizations.configs(steps):
        launcher.check(launcher.find(config))
    kept_runs.make_folder(asked.folder, "ablate")
    hold(asked, values_of(own))
    bench = Bench(asked, steps, detection.detect(), Console(quiet=quiet), rank(own.adapter.ours("r")))
    place = asked.folder / stem(asked)
    few = steps.measure.held_out_rows
    bench.held_out = measured_run.cut_held_out(own.data.validation, place, few, bench.screen)
    bench.short = measured_run.length(steps.measure.steps, steps.measure.warm_up, own.adapter)
    bench.screen.say(*[f"note: in runs {one}" for one in bench.short if one.startswith("adapter.")])
    started, rows = time.monotonic(), begin(bench)
    alone(bench, rows)
    variant, kept = stack(bench, rows)
    repeat_recipe(bench)
    found = collect(bench, rows, variant, kept, time.monotonic() - started)
    best = load_recipe(
        asked.path,
        [*asked.overrides, *varied_keys.overrides(best_values(bench, rows, variant))],
    )
    safe_files.write_text(place, "best.yaml", ablation_report.best(best, found))
    ablation_report.write(place, found, bench.machine)
    ablation_report.show(bench.screen, found, place)
    return found


def check_baseline(asked: Asked, steps: Ladder) -> None:
    """Check the baseline as `finetune check` does; an error names the place in the ablation file."""
    overrides = varied_keys.overrides(steps.baseline.set)
    try:
        for look in (checker.run, choice_checks.setup_of):
            look(load_recipe(asked.path, [*asked.overrides, *overrides]))
    except UserError as error:
        places = {key: steps.place("baseline", "set", key) for key in steps.baseline.set}
        found = [replace(one, where=places.get(one.key, one.where)) for one in error.problems]
        raise UserError(*found, code=error.code) from None


def hold(asked: Asked, now: dict[str, str]) -> None:
    """Refuse a folder whose results are of another recipe (exit 2): files of one name may be of many."""
    place = asked.folder / stem(asked)
    there = (place / "ladder.json").exists()
    began = RunFolder(place).read("ladder.json")["values"] if there else now
    kept_runs.check_same(began, now, place, "--output another folder")


def stem(asked: Asked) -> str:
    return Path(asked.path).stem


def rank(r: object) -> str:
    return f"_rank{r}" if isinstance(r, int) else ""


def begin(bench: Bench) -> list[dict[str, Any]]:
    """A row for each optimization; those that can't be measured here have their reason already."""
    rows = []
    for rung in bench.ladder.rungs:
        row: dict[str, Any] = {"name": rung.name, "kind": rung.kind, "what": rung.what, "on": rung.on}
        row |= {"status": "", "why": ""}
        stands = [rung, *optimizations.stands_on(bench.ladder, rung)]
        lacking = next(
            filter(None, (optimizations.missing(each.needs, bench.machine) for each in stands)), ""
        )
        status, why = rung.unmeasured
        if status:
            row |= {"status": status, "why": why}
        elif lacking:
            row |= {"status": "skipped", "why": lacking}
        elif refused := refusal(bench, optimizations.add(optimizations.below(bench.ladder, rung), rung)):
            row |= {"status": "refused", "why": refused}
        rows.append(row)
    return rows


def refusal(bench: Bench, variant: Variant) -> str:
    """Why `finetune check` refuses a variant; the empty string if it does not."""
    try:
        checker.run(load_recipe(bench.asked.path, [*bench.asked.overrides, *variant.overrides]))
    except UserError as error:
        return in_one_line(error)
    return ""


def measure(bench: Bench, name: str, kind: str, stage: str, variant: Variant) -> None:
    """One more run of a variant, unless it is there."""
    group = bench.groups.setdefault(key(variant), [])
    number, setup = len(group) + 1, bench.ladder.measure
    place = bench.asked.folder / ("baseline" if kind == "baseline" else f"{kind}/{name}{bench.rank}")
    held_out, fraction = (bench.held_out, setup.validation_fraction) if number == 1 else (None, None)
    validation = {"data.validation": held_out}
    validation |= {"data.validation_fraction": fraction} if fraction and not held_out else {}
    values = [*bench.asked.overrides, *bench.short, *variant.overrides, *varied_keys.overrides(validation)]
    folder = place / f"{stem(bench.asked)}-{stage}-{number}"
    named = variant.accelerate or setup.accelerate
    config = str(launcher.find(named)) if named else None
    job = measured_run.Job(bench.asked.path, values, folder, variant.mixed_precision, config)
    fresh = measured_run.make(job, cpu=bench.machine.device == "cpu")
    found = measured_run.figures(folder, setup.warm_up)
    group.append(found)
    bench.latest = key(variant)
    bench.kept_seconds += 0.0 if fresh else found["seconds"]
    base = bench.of(optimizations.baseline(bench.ladder))[:1]
    if not found["failed"] and base and not base[0]["failed"]:
        apart = measured_run.not_comparable(found["machine"], base[0]["machine"])
        if apart and kind in ("baseline", "recipe"):
            raise not_comparable(bench, "; ".join(apart), "what the first run is of")
        if apart:
            bench.strange[name] = "; ".join(apart)
    said = f"FAILED: {found['failed']}" if found["failed"] else f"{found['tokens_per_second']:,.0f} tokens/s"
    bench.screen.say(f"{folder.relative_to(bench.asked.folder)}: {'' if fresh else 'kept: '}{said}")


def not_comparable(bench: Bench, found: str, expected: str) -> UserError:
    what, where = "NOT COMPARABLE: these results are of other machines or data", str(bench.asked.folder)
    return UserError(Problem(what, "", where, found, expected, fix="--output another folder"))


def alone(bench: Bench, rows: list[dict[str, Any]]) -> None:
    """The baseline and every optimization on it, taking turns.

    Raises:
        UserError: the baseline fails (5), or is of another machine (2).
    """
    base = optimizations.baseline(bench.ladder)
    measure(bench, "baseline", "baseline", "baseline", base)
    first = bench.of(base)[0]
    if first["failed"]:
        problem = Problem("the baseline can't be run", where=first["run"], found=first["failed"])
        raise UserError(problem, code=Exit.TRAINING)
    here = bench.machine
    if here.name not in first["machine"]["hardware"]:
        raise not_comparable(bench, first["machine"]["hardware"], f"{here.count} x {here.name}")
    length = load_recipe(bench.asked.path, bench.asked.overrides).data.max_length
    bench.rows = max(1, round(first["tokens"] / length))
    jobs = [("baseline", "baseline", "baseline", base), ("as_is", "recipe", "alone", Variant(None, {}))]
    standing = defaultdict[str, list[tuple[str, str]]](list)  # optimizations, by what they stand on
    for row in rows:
        if not row["status"]:
            rung = bench.ladder.rung(row["name"])
            under = optimizations.below(bench.ladder, rung, bench.rows)
            if key(under) not in [key(job[-1]) for job in jobs]:  # no optimization alone is this variant
                jobs.append((rung.name, rung.kind, "under", under))
            jobs.append((rung.name, rung.kind, "alone", optimizations.add(under, rung, bench.rows)))
            standing[key(under)].append((rung.name, rung.kind))
    for number in range(1, bench.ladder.measure.repeats + 1):
        for name, kind, stage, variant in jobs:
            those = [(name, kind), *standing[key(variant)]]
            if len(bench.of(variant)) < number and (
                number == 1 or any(open_yet(bench, *one) for one in those)
            ):
                measure(bench, name, kind, stage, variant)
    if len(bench.of(base)) < 2:  # else nothing would be known of noise
        measure(bench, "baseline", "baseline", "baseline", base)
    bench.choose_rate()
    for row in rows:
        if not row["status"]:
            rung = bench.ladder.rung(row["name"])
            under = optimizations.below(bench.ladder, rung, bench.rows)
            runs = bench.of(optimizations.add(under, rung, bench.rows))
            row["alone"] = verdict.judge(bench.scale, rung, runs, bench.of(under), gate_of(bench, rung))


def gate_of(bench: Bench, rung: Rung) -> list[dict[str, Any]]:
    """Runs whose losses are the measure of an optimization alone: the baseline's, or, where other rows meet
    in its batches because of an optimization that it stands on, those of what it stands on."""
    others = any(one.gate == "held_out" for one in optimizations.stands_on(bench.ladder, rung))
    below = optimizations.below(bench.ladder, rung, bench.rows)
    return bench.of(below if others else optimizations.baseline(bench.ladder))


def open_yet(bench: Bench, name: str, kind: str) -> bool:
    """Whether another run alone, or of what it stands on, could change the verdict on an optimization."""
    if kind in ("baseline", "recipe"):
        return kind == "baseline"
    rung, scale = bench.ladder.rung(name), bench.scale
    below = optimizations.below(bench.ladder, rung, bench.rows)
    runs, under = bench.of(optimizations.add(below, rung, bench.rows)), bench.of(below)
    if verdict.judge(scale, rung, runs, under, gate_of(bench, rung))["verdict"] in ("error", "failed"):
        return False
    return not verdict.clear(scale, runs[0], under[0])


def stack(bench: Bench, rows: list[dict[str, Any]]) -> tuple[Variant, list[str]]:
    """Stack the optimizations, less those that don't help; the stack, and the names of what is in it."""
    base = optimizations.baseline(bench.ladder)
    current, kept, last = base, list[str](), ("baseline", "baseline")
    others = False  # whether other rows meet in the stack's batches than in the baseline's
    for row in rows:
        rung = bench.ladder.rung(row["name"])
        if row["status"] or settled(bench, row, rung, kept):
            continue
        variant = optimizations.add(current, rung, bench.rows)
        if key(variant) == key(current):
            row |= {"status": "dropped", "why": "the stack has it already"}
            continue
        runs, before = bench.of(variant), bench.of(current)
        if not runs or current != base:  # else it stands on the baseline, and took turns with it
            runs, before = beside(bench, rung, variant, current, last)
        gate = bench.of(current if others else base)
        found = row["stacked"] = verdict.judge(bench.scale, rung, runs, before, gate, rows)
        row |= {"status": found["verdict"], "why": found["why"]}
        if found["verdict"] == "kept":
            current, last, others = variant, (rung.name, rung.kind), others or rung.gate == "held_out"
            kept.append(rung.name)
    return current, kept


def repeat_recipe(bench: Bench) -> None:
    """The recipe as it is as often as everything else: the headline is against it."""
    own = Variant(None, {})
    while len(bench.of(own)) < bench.ladder.measure.repeats and not bench.of(own)[-1]["failed"]:
        measure(bench, "as_is", "recipe", "alone", own)


def beside(
    bench: Bench, rung: Rung, variant: Variant, current: Variant, last: tuple[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs of an optimization on the stack, each beside one of the stack: what drifts meanwhile is in both.

    Args:
        last: name and kind of the stack's last optimization, under which its runs lie.
    """
    runs, before = list[dict[str, Any]](), list[dict[str, Any]]()

    def stacked() -> None:
        if runs or bench.latest != key(current) or bench.of(current)[-1]["failed"]:  # else it ran just now
            measure(bench, *last, "again" if last[0] != "baseline" else "baseline", current)
        before.append(bench.of(current)[-1])

    def changed() -> None:
        measure(bench, rung.name, rung.kind, "stacked", variant)
        runs.append(bench.of(variant)[-1])

    for number in range(bench.ladder.measure.repeats):
        for one in (changed, stacked) if number % 2 else (stacked, changed):
            one()
        failed = runs[-1]["failed"] or before[-1]["failed"]
        if failed or (not number and not verdict.pays(bench.scale, rung, runs[0], before[0])):
            break
    return runs, before


def settled(bench: Bench, row: dict[str, Any], rung: Rung, kept: list[str]) -> bool:
    """Whether what an optimization did alone is reason enough not to stack it."""
    found, missing = row["alone"], [name for name in rung.on if name not in kept]
    if rung.name in bench.strange:
        row |= {"status": "NOT COMPARABLE", "why": bench.strange[rung.name]}
    elif found["verdict"] in ("error", "failed"):  # not if it was slower: on a stack it may gain
        row |= {"status": found["verdict"], "why": f"alone: {found['why']}"}
    elif missing:
        row |= {"status": "dropped", "why": f"it stands on {', '.join(missing)}, which the stack has not"}
    return bool(row["status"])


def best_values(bench: Bench, rows: list[dict[str, Any]], variant: Variant) -> dict[str, Any]:
    """What of the stack goes into the recipe: what was kept, and that nothing takes the place of what hurt.

    Where an optimization made no difference, or was not measured, the recipe's own value stays.
    """
    values = {}
    for row in rows:
        rung = bench.ladder.rung(row["name"])
        slower = rung.gain == "speed" and row.get("stacked", row.get("alone", {})).get("worse")
        hurt = row["status"] in ("failed", "error") or slower
        if row["status"] == "kept" or hurt:
            values |= {k: variant.values[k] for k in optimizations.keys(rung) if k in variant.values}
    return values


def collect(
    bench: Bench, rows: list[dict[str, Any]], variant: Variant, kept: list[str], seconds: float
) -> dict[str, Any]:
    """The content of ladder.json."""
    base = measured_run.summary(bench.of(optimizations.baseline(bench.ladder)))
    whole = measured_run.summary(bench.of(variant))
    as_is = bench.of(Variant(None, {}))
    words = ["finetune", "ablate", bench.asked.path, *bench.asked.overrides]
    words += ["--optimizations", str(bench.asked.ladder)] * (bench.asked.ladder != default_ladder())
    sources = {}
    for row in rows:
        rung = bench.ladder.rung(row["name"])
        for k in optimizations.keys(rung):
            if row["status"] == "kept" or k not in sources:
                sources[k] = f"{rung.name}, {row['status']}: {row['why']}"
    found = {
        "recipe": bench.asked.path,
        "values": values_of(load_recipe(bench.asked.path, bench.asked.overrides)),
        "command": shlex.join(words),
        "date": measured_run.dates([run for group in bench.groups.values() for run in group]),
        "machine": bench.of(optimizations.baseline(bench.ladder))[0]["machine"],
        "measure": bench.ladder.measure.model_dump(),
        "seconds": seconds + bench.kept_seconds,
        "rate": bench.rate,
        "noise": bench.scale.noise,
        "baseline": base,
        "as_is": None if all(run["failed"] for run in as_is) else measured_run.summary(as_is),
        "stack": whole | {"rungs": kept, "mixed_precision": variant.mixed_precision},
        "speedup": whole[bench.rate] / base[bench.rate],
        "rungs": rows,
        "sources": sources,
    }
    RunFolder(bench.asked.folder / stem(bench.asked)).write("ladder.json", found)
    return found


def default_ladder() -> Path:
    return shipped_files.folder("recipes") / "ablation.yaml"
