"""Measure each optimization of a recipe, alone and on top of the optimizations that helped.

The command is `finetune ablate RECIPE --optimizations FILE`.

DIR/<kind>/<name>_rank<r>/<recipe>-alone-1    each run is an ordinary run folder (`runner/measured_run.py`)
                         <recipe>-under-1     the setup below the optimization, if no other run measures it
DIR/<recipe>/ablation.json, .md, .svg, .html    the results (`ablation_report.py`)
DIR/<recipe>/best.yaml                        the recipe with the optimizations that helped

The runs of all variants are interleaved, in fresh processes. On the stack, each run of an optimization is
paired with a run of the stack. An optimization stays in the stack under three conditions: its gain exceeds
the noise, its losses match the baseline's within a band, and the validation examples exclude a cost above the
limit. Runs that cannot change a verdict are skipped. The headline compares with the user's recipe. The same
command resumes.
"""

from __future__ import annotations

import json
import shlex
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import progress, safe_files
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError, in_one_line
from finetune.experiments.ablation import ablation_report, optimizations, verdict
from finetune.experiments.ablation.optimizations import AblationFile, Optimization, Variant
from finetune.experiments.runner import kept_runs, measured_run, varied_keys
from finetune.experiments.runner.varied_keys import values_of
from finetune.hardware import detection
from finetune.hardware.detection import Hardware
from finetune.launch import launcher
from finetune.preflight import checker
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder.run_folder import RunFolder

BUSY = 0.05  # relative noise of wall-clock speed above which the CPU counts as shared


class AblationRequest(NamedTuple):
    """The arguments of an ablation."""

    path: str
    overrides: list[str]
    optimizations: Path
    folder: Path


@dataclass
class Bench:
    """The setup of an ablation and its measurements so far."""

    request: AblationRequest
    file: AblationFile
    machine: Hardware
    screen: Console
    files: dict[str, str]
    """`kept_runs.files_read` when the command started."""
    rank: str = ""
    held_out: str | None = None
    """File with a few validation examples. `None` if the recipe names no validation file."""
    short: list[str] = field(default_factory=list)
    """Overrides that limit a run to a few steps."""
    rows: int | None = None
    """Number of sequences of full length that have the baseline's tokens per step."""
    groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Figures of the runs of each variant, by `key`."""
    strange: dict[str, str] = field(default_factory=dict)
    """Optimizations with runs that are NOT COMPARABLE -> the reason."""
    rate: str = "tokens_per_second"
    """The figure that gains are computed from."""
    latest: str = ""
    """The `key` of the variant that ran last."""
    kept_seconds: float = 0.0
    """Total time of the runs that an earlier command finished."""

    def recipe(self) -> Any:
        return load_recipe(self.request.path, self.request.overrides)

    def of(self, variant: Variant) -> list[dict[str, Any]]:
        return self.groups.get(key(variant), [])

    def noise(self, figure: str) -> float | None:
        """Return the relative standard deviation of one run."""
        whole = [
            [run[figure] for run in group if not run["failed"] and run[figure]]
            for group in self.groups.values()
        ]
        return measured_run.noise(whole)

    @property
    def date(self) -> str | None:
        """The date that the chat template got in the first run. Other dates would make other examples."""
        first = self.of(optimizations.baseline(self.file))[:1]
        return first[0]["machine"].get("template date") if first else None

    @property
    def scale(self) -> verdict.Scale:
        noise = {figure: self.noise(figure) for figure in (*measured_run.UNITS, "memory_gib")}
        return verdict.Scale(self.file.measure, self.rate, noise)

    def choose_rate(self) -> None:
        """Measure by CPU seconds if other work shares the CPU and CPU seconds vary less than the clock."""
        clock, taken = (self.noise(f"tokens_per_{second}") for second in ("second", "cpu_second"))
        if self.machine.device == "cpu" and clock and taken is not None and clock > max(BUSY, taken):
            self.rate = "tokens_per_cpu_second"
            said = f"noise: {clock:.0%} by the clock, {taken:.1%} by CPU seconds"
            self.screen.say(f"note: other work uses this CPU ({said}), so gains are in tokens per CPU second")


def key(variant: Variant) -> str:
    return json.dumps(variant, sort_keys=True)


@measured_run.stoppable()
def run(request: AblationRequest, *, quiet: bool = False) -> dict[str, Any]:
    """Measure the optimizations, and write the table, plot, page and best recipe.

    Returns:
        The content of ablation.json.

    Raises:
        UserError: the recipe or the ablation file is not valid, or the folder holds results of another
            machine or recipe (exit 2). The baseline fails (exit 5).
        Stopped: a signal arrived. The same command resumes.
    """
    if launcher.launched():
        raise UserError(
            Problem(
                "`ablate` can't run under a launcher",
                fix=f"finetune ablate {shlex.quote(request.path)}",
                why="it starts its own processes",
                code="launch-config",
            )
        )
    own = load_recipe(request.path, request.overrides)
    check_name(request)
    given = optimizations.read(request.optimizations)
    optimizations.check_values(given, own.adapter.type)
    optimizations.check_rows(given, own)
    steps = optimizations.of_type(given, own.adapter.type)
    checker.check_without_examples(own)
    optimizations.check_baseline(own, request.path, request.overrides, steps)
    optimizations.check_configs(steps)
    kept_runs.make_folder(request.folder, "ablate")
    with kept_runs.claimed(request.folder / stem(request)):
        return measure_all(request, steps, quiet=quiet)


def measure_all(request: AblationRequest, steps: AblationFile, *, quiet: bool) -> dict[str, Any]:
    """Measure each optimization alone and on top of the others. Otherwise as `run`."""
    own = load_recipe(request.path, request.overrides)
    hold(request, values_of(own))
    files, screen = kept_runs.files_read(own), Console(quiet=quiet)
    bench = Bench(request, steps, detection.detect(), screen, files, rank(own.adapter.ours("r")))
    place = request.folder / stem(request)
    few = steps.measure.held_out_rows
    bench.held_out = measured_run.cut_held_out(own.data.validation, place, few, bench.screen)
    bench.short = measured_run.length(steps.measure.steps, steps.measure.warm_up, own.adapter)
    bench.screen.say(*[f"note: the runs set {one}" for one in bench.short if one.startswith("adapter.")])
    started, rows = time.monotonic(), begin(bench)
    with progress.phase(bench.screen, "each alone"):
        alone(bench, rows)
    with progress.phase(bench.screen, "combined"):
        variant, kept = stack(bench, rows)
        repeat_recipe(bench)
    found = collect(bench, rows, variant, kept, time.monotonic() - started)
    best = load_recipe(
        request.path,
        [*request.overrides, *varied_keys.overrides(best_values(bench, rows, variant))],
    )
    safe_files.write_text(place, "best.yaml", ablation_report.best(best, found))
    ablation_report.write(place, found, bench.machine)
    ablation_report.show(bench.screen, found, place)
    return found


def hold(request: AblationRequest, now: dict[str, str]) -> None:
    """Raise a UserError if the folder holds results of another recipe (exit 2).

    Two recipes with the same file name use the same folder.
    """
    place = request.folder / stem(request)
    there = (place / "ablation.json").exists()
    began = RunFolder(place).read("ablation.json")["values"] if there else now
    kept_runs.check_same(began, now, place, "choose another folder with --output")


def check_name(request: AblationRequest) -> None:
    """Refuse a recipe whose name without `.yaml` leads out of the folder of the results (exit 2)."""
    if stem(request) in (".", ".."):
        raise UserError(
            Problem(
                "finetune can't name the folder of the results after this recipe",
                where=request.path,
                found=f"{stem(request)!r} before the ending",
                fix="rename the recipe",
                code="experiment",
            )
        )


def stem(request: AblationRequest) -> str:
    return Path(request.path).stem


def rank(r: object) -> str:
    return f"_rank{r}" if isinstance(r, int) else ""


def begin(bench: Bench) -> list[dict[str, Any]]:
    """Return a result row for each optimization.

    Optimizations that cannot be measured here get their reason.
    """
    rows = []
    for optimization in bench.file.optimizations:
        row: dict[str, Any] = {
            "name": optimization.name,
            "kind": optimization.kind,
            "what": optimization.what,
            "on": optimization.on,
            "status": "",
            "why": "",
        }
        stands = [optimization, *optimizations.stands_on(bench.file, optimization)]
        lacking = next(
            filter(None, (optimizations.missing(each.needs, bench.machine) for each in stands)), ""
        )
        status, why = optimization.unmeasured
        if status:
            row |= {"status": status, "why": why}
        elif lacking:
            row |= {"status": "skipped", "why": lacking}
        elif refused := refusal(
            bench, optimizations.add(optimizations.below(bench.file, optimization), optimization)
        ):
            row |= {"status": "refused", "why": refused}
        rows.append(row)
    return rows


def refusal(bench: Bench, variant: Variant) -> str:
    """Return the error of `finetune check` for a variant, or an empty string."""
    try:
        checker.check_without_examples(
            load_recipe(bench.request.path, [*bench.request.overrides, *variant.overrides])
        )
    except UserError as error:
        return in_one_line(error)
    return ""


def measure(bench: Bench, name: str, kind: str, stage: str, variant: Variant) -> None:
    """Run a variant once more, unless an earlier command finished this run."""
    group = bench.groups.setdefault(key(variant), [])
    number, setup = len(group) + 1, bench.file.measure
    place = bench.request.folder / ("baseline" if kind == "baseline" else f"{kind}/{name}{bench.rank}")
    held_out, fraction = (bench.held_out, setup.validation_fraction) if number == 1 else (None, None)
    validation = {"data.validation": held_out}
    validation |= {"data.validation_fraction": fraction} if fraction and not held_out else {}
    values = [*bench.request.overrides, *bench.short, *variant.overrides, *varied_keys.overrides(validation)]
    values += [f"data.template_date={bench.date}"] * bool(bench.date)
    folder = place / f"{stem(bench.request)}-{stage}-{number}"
    named = variant.accelerate or setup.accelerate
    config = str(launcher.find(named)) if named else None
    job = measured_run.RunCommand(bench.request.path, values, folder, variant.mixed_precision, config)
    run = folder.relative_to(bench.request.folder)
    fresh = measured_run.make(job, cpu=bench.machine.device == "cpu")
    kept_runs.check_unchanged(bench.files, kept_runs.files_read(bench.recipe()), folder)
    found = measured_run.figures(folder, setup.warm_up)
    group.append(found)
    bench.latest = key(variant)
    bench.kept_seconds += 0.0 if fresh else found["seconds"]
    base = bench.of(optimizations.baseline(bench.file))[:1]
    if not found["failed"] and base and not base[0]["failed"]:
        apart = measured_run.not_comparable(found["machine"], base[0]["machine"])
        if apart and kind in ("baseline", "recipe"):
            raise not_comparable(bench, "; ".join(apart), "the same values as in the first run")
        if apart:
            bench.strange[name] = "; ".join(apart)
    said = f"FAILED: {found['failed']}" if found["failed"] else f"{found['tokens_per_second']:,.0f} tokens/s"
    bench.screen.say(f"{run}: {'' if fresh else 'kept: '}{said}")


def not_comparable(bench: Bench, found: str, expected: str) -> UserError:
    return UserError(
        Problem(
            "NOT COMPARABLE: the folder has results of another machine or other data",
            where=str(bench.request.folder),
            found=found,
            expected=expected,
            fix="choose another folder with --output",
            code="experiment",
        )
    )


def alone(bench: Bench, rows: list[dict[str, Any]]) -> None:
    """Measure the baseline and each optimization on top of it, with interleaved runs.

    Raises:
        UserError: the baseline fails (exit 5), or was run on another machine (exit 2).
    """
    base = optimizations.baseline(bench.file)
    progress.expect(bench.file.measure.repeats * (len(rows) + 2))  # about; counted again below
    measure(bench, "baseline", "baseline", "baseline", base)
    first = bench.of(base)[0]
    if first["failed"]:
        raise UserError(
            Problem(
                "the run of the baseline failed",
                where=first["run"],
                found=first["failed"],
                fix=f"read {first['run']}.log, and run the same command again",
                code="experiment",
                why="finetune compares every optimization with the baseline",
            ),
            code=Exit.TRAINING,
        )
    here = bench.machine
    if here.name not in first["machine"]["hardware"]:
        raise not_comparable(bench, first["machine"]["hardware"], f"{here.count} x {here.name}")
    length = load_recipe(bench.request.path, bench.request.overrides).data.max_length
    bench.rows = max(1, round(first["tokens"] / length))
    jobs = [("baseline", "baseline", "baseline", base), ("as_is", "recipe", "alone", Variant(None, {}))]
    # Setup that optimizations build on -> their names and kinds
    standing = defaultdict[str, list[tuple[str, str]]](list)
    for row in rows:
        if not row["status"]:
            optimization = bench.file.optimization(row["name"])
            under = optimizations.below(bench.file, optimization, bench.rows)
            if key(under) not in [key(job[-1]) for job in jobs]:  # no other job measures this setup
                jobs.append((optimization.name, optimization.kind, "under", under))
            jobs.append(
                (
                    optimization.name,
                    optimization.kind,
                    "alone",
                    optimizations.add(under, optimization, bench.rows),
                )
            )
            standing[key(under)].append((optimization.name, optimization.kind))
    repeats = bench.file.measure.repeats
    progress.expect(repeats * len(jobs))  # at most
    for number in range(1, repeats + 1):
        for place, (name, kind, stage, variant) in enumerate(jobs, start=(number - 1) * len(jobs)):
            progress.reach(place)
            those = [(name, kind), *standing[key(variant)]]
            if len(bench.of(variant)) < number and (
                number == 1 or any(open_yet(bench, *one) for one in those)
            ):
                measure(bench, name, kind, stage, variant)
    if len(bench.of(base)) < 2:  # a single run gives no estimate of noise
        measure(bench, "baseline", "baseline", "baseline", base)
    bench.choose_rate()
    for row in rows:
        if not row["status"]:
            row["alone"], _, _ = judge_alone(bench, row["name"])


def judge_alone(bench: Bench, name: str) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the verdict on an optimization alone, its runs, and the runs of the setup below it.

    Its losses are compared with the baseline's. If it builds on others that change the batches, they are
    compared with those of that setup.
    """
    optimization = bench.file.optimization(name)
    below = optimizations.below(bench.file, optimization, bench.rows)
    runs, under = bench.of(optimizations.add(below, optimization, bench.rows)), bench.of(below)
    others = any(one.gate == "held_out" for one in optimizations.stands_on(bench.file, optimization))
    gate = under if others else bench.of(optimizations.baseline(bench.file))
    return verdict.judge(bench.scale, optimization, runs, under, gate), runs, under


def open_yet(bench: Bench, name: str, kind: str) -> bool:
    """Return whether another run of the optimization or of its setup could change the verdict."""
    if kind in ("baseline", "recipe"):
        return kind == "baseline"
    found, runs, under = judge_alone(bench, name)
    return found["verdict"] not in ("error", "failed") and not verdict.clear(bench.scale, runs[0], under[0])


def stack(bench: Bench, rows: list[dict[str, Any]]) -> tuple[Variant, list[str]]:
    """Build the stack from the optimizations that help.

    Return its variant and the names of its optimizations.
    """
    base = optimizations.baseline(bench.file)
    current, kept, last = base, list[str](), ("baseline", "baseline")
    others = False  # whether the stack's batches hold other examples than the baseline's
    most = 2 * bench.file.measure.repeats  # runs of one optimization
    progress.expect(most * (len(rows) + 1))
    for number, row in enumerate(rows):
        progress.reach(most * number)
        optimization = bench.file.optimization(row["name"])
        if row["status"] or settled(bench, row, optimization, kept):
            continue
        variant = optimizations.add(current, optimization, bench.rows)
        if key(variant) == key(current):
            row |= {"status": "dropped", "why": "the stack already has these values"}
            continue
        runs, before = bench.of(variant), bench.of(current)
        if not runs or current != base:  # otherwise both are on the baseline, and their runs were interleaved
            runs, before = run_in_pairs(bench, optimization, variant, current, last)
        gate = bench.of(current if others else base)
        found = row["stacked"] = verdict.judge(bench.scale, optimization, runs, before, gate, rows)
        row |= {"status": found["verdict"], "why": found["why"]}
        if found["verdict"] == "kept":
            current, last, others = (
                variant,
                (optimization.name, optimization.kind),
                others or optimization.gate == "held_out",
            )
            kept.append(optimization.name)
    return current, kept


def repeat_recipe(bench: Bench) -> None:
    """Run the user's recipe as often as the other variants, because the headline compares with it."""
    own = Variant(None, {})
    while len(bench.of(own)) < bench.file.measure.repeats and not bench.of(own)[-1]["failed"]:
        measure(bench, "as_is", "recipe", "alone", own)


def run_in_pairs(
    bench: Bench, optimization: Optimization, variant: Variant, current: Variant, last: tuple[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Run an optimization on the stack, each run paired with a run of the stack, so that drift affects both.

    Args:
        last: name and kind of the stack's last optimization, whose folder holds the runs of the stack.

    Returns:
        The runs with the optimization and the runs without it.
    """
    runs, before = list[dict[str, Any]](), list[dict[str, Any]]()

    def stacked() -> None:
        # Otherwise the stack ran last, and that run is the pair
        if runs or bench.latest != key(current) or bench.of(current)[-1]["failed"]:
            measure(bench, *last, "again" if last[0] != "baseline" else "baseline", current)
        before.append(bench.of(current)[-1])

    def changed() -> None:
        measure(bench, optimization.name, optimization.kind, "stacked", variant)
        runs.append(bench.of(variant)[-1])

    for number in range(bench.file.measure.repeats):
        for one in (changed, stacked) if number % 2 else (stacked, changed):
            one()
        failed = runs[-1]["failed"] or before[-1]["failed"]
        if failed or (not number and not verdict.pays(bench.scale, optimization, runs[0], before[0])):
            break
    return runs, before


def settled(bench: Bench, row: dict[str, Any], optimization: Optimization, kept: list[str]) -> bool:
    """Return whether the results alone, or a missing optimization, exclude this one from the stack."""
    found, missing = row["alone"], [name for name in optimization.on if name not in kept]
    if optimization.name in bench.strange:
        row |= {"status": "NOT COMPARABLE", "why": bench.strange[optimization.name]}
    # An optimization that is slower alone may still gain on the stack
    elif found["verdict"] in ("error", "failed"):
        row |= {"status": found["verdict"], "why": f"alone: {found['why']}"}
    elif missing:
        row |= {"status": "dropped", "why": f"it needs {', '.join(missing)}, which the stack does not have"}
    return bool(row["status"])


def best_values(bench: Bench, rows: list[dict[str, Any]], variant: Variant) -> dict[str, Any]:
    """Return the values of optimizations that helped, and the baseline's values for those that hurt.

    The recipe's own value stays if an optimization made no difference or was not measured.
    """
    values = {}
    for row in rows:
        optimization = bench.file.optimization(row["name"])
        slower = optimization.gain == "speed" and row.get("stacked", row.get("alone", {})).get("worse")
        hurt = row["status"] in ("failed", "error") or slower
        if row["status"] == "kept" or hurt:
            values |= {k: variant.values[k] for k in optimizations.keys(optimization) if k in variant.values}
    return values


def collect(
    bench: Bench, rows: list[dict[str, Any]], variant: Variant, kept: list[str], seconds: float
) -> dict[str, Any]:
    """Return the content of ablation.json."""
    base = measured_run.summary(bench.of(optimizations.baseline(bench.file)))
    whole = measured_run.summary(bench.of(variant))
    as_is = bench.of(Variant(None, {}))
    words = ["finetune", "ablate", bench.request.path, *bench.request.overrides]
    words += ["--optimizations", str(bench.request.optimizations)] * (
        bench.request.optimizations != optimizations.default_optimizations()
    )
    sources = {}
    for row in rows:
        optimization = bench.file.optimization(row["name"])
        for k in optimizations.keys(optimization):
            if row["status"] == "kept" or k not in sources:
                sources[k] = f"{optimization.name}, {row['status']}: {row['why']}"
    found = {
        "recipe": bench.request.path,
        "values": values_of(load_recipe(bench.request.path, bench.request.overrides)),
        "command": shlex.join(words),
        "date": measured_run.dates([run for group in bench.groups.values() for run in group]),
        "machine": bench.of(optimizations.baseline(bench.file))[0]["machine"],
        "measure": bench.file.measure.model_dump(),
        "seconds": seconds + bench.kept_seconds,
        "rate": bench.rate,
        "noise": bench.scale.noise,
        "baseline": base,
        "as_is": None if all(run["failed"] for run in as_is) else measured_run.summary(as_is),
        "stack": whole | {"optimizations": kept, "mixed_precision": variant.mixed_precision},
        "speedup": whole[bench.rate] / base[bench.rate],
        "optimizations": rows,
        "sources": sources,
    }
    RunFolder(bench.request.folder / stem(bench.request)).write("ablation.json", found)
    return found
