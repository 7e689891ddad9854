"""Compare adapter types on the same data, with the same seeds and the same steps or time.

The command is `finetune compare RECIPE --adapters lora,dora`.

DIR/<type>-seed<N>/                          each run is an ordinary run folder
DIR/compare.json, compare.md, compare.svg    the results (`comparison_report.py`)
DIR/best.yaml                                the recipe of the winner
DIR/aside/                                   replaced folders: unfinished runs, or runs of another recipe

The same command resumes. It keeps finished runs of the same recipe on the same data.

If a run fails, the table shows the failure and the next run starts. With several processes this requires that
all processes report the same error. Otherwise some processes can wait for others in the middle of training,
so the comparison ends.

Each run loads the base model again, because that is fast: 8 billion parameters from the page cache take 3.3 s
to an H100. A copy in host memory would save only 0.8 s per run, and takes 13 s and 16 GB to create.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import math
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache

from finetune.core import progress, safe_files
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError, first_line, in_one_line, nearest, raise_if_any
from finetune.distributed import collectives
from finetune.experiments.comparison import comparison_report
from finetune.experiments.comparison.comparison_report import MARK
from finetune.experiments.runner import kept_runs
from finetune.hardware import detection
from finetune.preflight import checker
from finetune.recipe import adapter_types
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder
from finetune.training import pipeline

# Steps of the short run that times a type, and the number of last steps that count
PILOT_STEPS, PILOT_TIMED = 8, 5
NO_EVALUATION = [
    "data.validation=null",
    "data.validation_fraction=null",
    "eval.tasks=[]",
    "eval.forgetting=false",
]
FEWEST_STEPS = 10  # minimum for a run within a budget, because fewer steps show nothing


class ComparisonRequest(NamedTuple):
    """The arguments of a comparison."""

    path: str
    overrides: list[str]
    adapters: list[str]
    """Adapter types, each as `type` or `type@learning_rate`."""
    seeds: int
    budget: float | None
    """Seconds for the whole comparison."""
    folder: Path


class Entrant(NamedTuple):
    type: str
    rate: float
    why: str
    """Source of the learning rate."""


class ComparedRun(NamedTuple):
    """One run of the comparison."""

    entrant: Entrant
    seed: int
    recipe: Recipe
    folder: RunFolder
    identity: str
    files: dict[str, str]
    """`kept_runs.files_read` when the command started."""
    """Hash of the recipe and its data. A finished run with the same hash is kept."""

    @property
    def name(self) -> str:
        return self.folder.path.name


def run(requested: ComparisonRequest, *, quiet: bool = False) -> dict[str, Any]:
    """Train and evaluate each type with each seed, and write the table, the plot and the winner's recipe.

    Returns:
        The content of compare.json.

    Raises:
        UserError: a recipe is not valid, found before training starts (exit 2). No run finished, or a run
            failed on some processes only (exit 5).
    """
    jobs = plan(requested)
    kept_runs.make_folder(requested.folder, "compare")
    with kept_runs.claimed(requested.folder):
        return train_and_compare(jobs, requested, quiet)


def train_and_compare(jobs: list[ComparedRun], requested: ComparisonRequest, quiet: bool) -> dict[str, Any]:
    """Train all runs that are not kept, and write the tables. Otherwise as `run`."""
    state = collectives.joined(detection.detect().device)
    collectives.failures()
    screen = Console(quiet=quiet or not state.is_main_process)
    introduce(jobs, requested, screen)
    failed = {}
    if requested.budget is not None:
        jobs, failed = within(requested.budget, jobs, requested, screen)
    settings = {
        "recipe": requested.path,
        "budget_seconds": requested.budget,
        "entrants": {job.entrant.type: job.entrant._asdict() for job in jobs},
        "runs": [job.name for job in jobs],
    }
    with progress.phase(screen, "compare", parts=len(jobs)):
        for number, job in enumerate(jobs, start=1):
            head = f"{number}/{len(jobs)}  {job.name}:"
            if job.name not in failed and make_way(job, screen, head):
                failed |= run_and_report(job, screen, head)
            progress.reach(number)
            if state.is_main_process:
                comparison_report.write(requested.folder, settings, failed)
            state.wait_for_everyone()
    found = collectives.from_main(lambda: comparison_report.collect(requested.folder, settings, failed))
    if not found["runs"]:
        problems = [
            Problem(what, found=reason, fix=f"read {requested.folder / name}/log.txt", code="experiment")
            for name, reason in failed.items()
            for what in [f"the run {name} failed"]
        ]
        raise UserError(*problems, code=Exit.TRAINING)
    if state.is_main_process:
        comparison_report.show(requested.folder, found, {job.name: job.recipe for job in jobs}, screen)
    return found


def plan(requested: ComparisonRequest, steps: dict[str, int] | None = None) -> list[ComparedRun]:
    """Return the runs, ordered by seed, so that a comparison that is stopped early is still balanced.

    Args:
        steps: optimizer steps of each type, which replace the recipe's.

    Raises:
        UserError: all problems of all recipes.
    """
    own = load_recipe(requested.path, requested.overrides)
    data = list(kept_runs.contents(own.data).values())
    jobs, problems, codes = [], {}, []
    for seed in range(own.train.seed, own.train.seed + requested.seeds):
        for entrant in enter(own, requested.adapters):
            folder = RunFolder(requested.folder / f"{entrant.type}-seed{seed}")
            overrides = [*requested.overrides, *setting(entrant, seed, folder.path)]
            if steps is not None:
                overrides += limit(own, steps[entrant.type])
            try:
                recipe = load_recipe(requested.path, overrides)
                if seed == own.train.seed:
                    checker.check_without_examples(recipe)
            except UserError as error:
                problems |= {str(problem): problem for problem in error.problems}
                codes.append(error.code)
            else:
                own_identity, files = kept_runs.identity(recipe, data), kept_runs.files_read(recipe)
                jobs.append(ComparedRun(entrant, seed, recipe, folder, own_identity, files))
    if problems:
        raise UserError(*problems.values(), code=min(codes))
    kept = (kept_runs.date_of(job.folder, MARK, job.identity) for job in jobs)
    return with_date(jobs, next(filter(None, kept), None))


def with_date(jobs: list[ComparedRun], date: str | None) -> list[ComparedRun]:
    """Give the chat template of all runs the same date, because other dates make other examples.

    Args:
        date: the date of the runs that are kept, or `None` for today.
    """
    data = jobs[0].recipe.data
    date = date or data.template_date or datetime.date.today().isoformat()
    return [
        job._replace(
            recipe=job.recipe.model_copy(
                update={"data": job.recipe.data.model_copy(update={"template_date": date})}
            )
        )
        for job in jobs
    ]


def enter(own: Recipe, adapters: list[str]) -> list[Entrant]:
    """Return the types and their learning rates.

    The recipe's learning rate suits its own type. Another type gets the rate at the same relative position on
    a log scale in its own usual range.
    """
    types = adapter_types.all_types()
    offered = [name for name, kind in types.items() if not kind.refused]
    found, problems = [], []
    for text in adapters:
        name, at, stated = text.partition("@")
        if name not in offered:
            known = types.get(name)
            problems.append(
                Problem(
                    "finetune can't train this adapter type"
                    if known
                    else "finetune does not have this adapter type",
                    where="--adapters",
                    found=repr(name),
                    fix=nearest(name, offered) or "--adapters lora,dora",
                    why=known.refused if known else "",
                    code="adapter-type",
                )
            )
        elif name in [entrant.type for entrant in found]:
            problems.append(
                Problem(
                    "the list names an adapter type twice",
                    where="--adapters",
                    found=name,
                    fix="remove one of them",
                    code="experiment",
                )
            )
        elif at:
            try:
                found.append(Entrant(name, float(stated), "--adapters"))
            except ValueError:
                problems.append(
                    Problem(
                        "the learning rate is not a number",
                        where="--adapters",
                        found=text,
                        fix=f"{name}@1e-3",
                        code="value-type",
                    )
                )
        else:
            found.append(
                Entrant(name, *adapter_types.rate_for(name, own.adapter.type, own.train.learning_rate))
            )
    raise_if_any(problems)
    return found


def setting(entrant: Entrant, seed: int, folder: Path) -> list[str]:
    """Return the overrides that turn the recipe into this run's recipe."""
    return [
        f"adapter.type={entrant.type}",
        f"train.learning_rate={entrant.rate!r}",
        f"train.seed={seed}",
        kept_runs.in_folder(folder),
    ]


def limit(own: Recipe, steps: int) -> list[str]:
    """Return overrides for a number of steps. The whole schedule fits, and the warm-up is at most a tenth."""
    warm_up = own.train.passed_on().get("warmup_steps") or 0
    capped = [f"train.warmup_steps={steps // 10}"] if warm_up > max(1, steps // 10) else []
    return [f"train.max_steps={steps}", *capped]


def introduce(jobs: list[ComparedRun], requested: ComparisonRequest, screen: Console) -> None:
    """Show the planned runs and the notes on them."""
    first = [job for job in jobs if job.seed == jobs[0].seed]
    rows = [(job.entrant.type, f"{job.entrant.rate:g}", job.entrant.why) for job in first]
    screen.table(f"{len(jobs)} runs in {requested.folder}", ("type", "learning rate", "source"), rows)
    notes = [
        note for job in first for note in (*job.recipe.origin.notices, *adapter_types.advice(job.recipe))
    ]
    if requested.seeds > 1 and jobs[0].recipe.data.validation_fraction:
        notes.append(
            "data.validation_fraction: each seed has another validation set, which makes the scores vary more"
        )
    if requested.seeds == 1:
        notes.append("one seed does not show how much scores vary; use --seeds 3")
    if requested.budget and jobs[0].recipe.eval.eval_steps:
        notes.append("eval.eval_steps: --budget counts only the final evaluation, so the runs take longer")
    screen.note(*dict.fromkeys(notes))
    screen.say("")


def make_way(job: ComparedRun, screen: Console, head: str) -> bool:
    """Return whether the run is still needed. Move any other content of its folder to aside/."""

    def cleared() -> bool:
        moved = kept_runs.clear_place(job.folder, MARK, job.identity)
        if moved is None:
            screen.say(f"{head} kept: {comparison_report.line(job.folder)}")
        elif moved:
            screen.say(f"{head} {moved}")
        return moved is not None

    return collectives.from_main(cleared)


def run_and_report(job: ComparedRun, screen: Console, head: str) -> dict[str, str]:
    """Run a job and print its result. Return the reason by the name of the job if it fails."""
    path, train = job.folder.path, job.recipe.train
    screen.say(f"{head} running; its log is {path}/log.txt")
    with kept_runs.part(job.name, path, train.max_steps, train.num_train_epochs):
        reason = run_one(job)
    if PartialState().is_main_process:
        screen.say(f"{head} " + (f"FAILED: {reason}" if reason else comparison_report.line(job.folder)))
    return {job.name: reason} if reason else {}


def run_one(job: ComparedRun) -> str:
    """Train and evaluate. Return the reason if it fails, else an empty string.

    Raises:
        UserError: the run failed differently on different processes (exit 5), or a file changed since the
            command started (exit 2).
    """
    before, started = clear_memory(), time.monotonic()
    try:
        pipeline.run(job.recipe, verbosity="quiet")
    except Exception as error:  # an error in a library or in finetune must not lose the other runs
        reason = why(error)
        if not collectives.shared(kind(error)):
            who = f"process {PartialState().process_index}"
            raise UserError(
                Problem(
                    f"the run {job.name} failed on {who}, but not on all processes",
                    where=str(job.folder.path),
                    found=reason,
                    fix="run the same command again, or remove this type from --adapters",
                    code="experiment",
                ),
                code=Exit.TRAINING,
            ) from error
        return reason
    collectives.from_main(
        lambda: kept_runs.check_unchanged(job.files, kept_runs.files_read(job.recipe), job.folder.path)
    )
    if PartialState().is_main_process:
        mark = {
            "identity": job.identity,
            "seconds": time.monotonic() - started,
            "host_memory_before_gib": before,
        }
        job.folder.write(MARK, mark)
    PartialState().wait_for_everyone()
    return ""


def kind(error: Exception) -> str:
    """Return the part of an error that all processes share. Messages can contain values of one GPU."""
    if isinstance(error, UserError):
        return in_one_line(error)
    return type(error).__name__


def why(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, UserError):
        return in_one_line(error, with_found=True)
    return f"{type(error).__name__}: {first_line(error)}"


def clear(place: Path) -> None:
    """Delete a folder that no process reads any more."""
    PartialState().wait_for_everyone()
    if PartialState().is_main_process:
        with contextlib.suppress(OSError):
            safe_files.remove(place.parent, place.name)
    PartialState().wait_for_everyone()


def clear_memory() -> float:
    """Free the memory of earlier runs and reset peak statistics. Return the memory of this process in GiB."""
    clear_device_cache(garbage_collection=True)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    return psutil.Process().memory_info().rss / 2**30


def within(
    budget: float, jobs: list[ComparedRun], requested: ComparisonRequest, screen: Console
) -> tuple[list[ComparedRun], dict[str, str]]:
    """Return the runs with the steps that fit into equal shares of the budget, and the failed runs."""
    place = RunFolder(requested.folder)
    question = {"budget_seconds": budget, "runs": [job.identity for job in jobs]}
    known = collectives.from_main(lambda: kept_runs.read_signed(place, "budget.json"))
    if any(known.get(key) != value for key, value in question.items()) or not is_whole(known, jobs):
        known = {}
    if not known or known["failed"]:  # a type that failed before may work now
        known = question | measure(budget, jobs, requested, screen, known)
        if PartialState().is_main_process:
            kept_runs.write_signed(place, "budget.json", known)
    steps, failed = known["steps"], known["failed"]
    rows = [(kind, n, f"{known['step_seconds'][kind]:.4g}") for kind, n in steps.items()]
    screen.table("steps that fit the budget", ("type", "steps", "seconds per step"), rows)
    runs = plan(requested, {**{job.entrant.type: FEWEST_STEPS for job in jobs}, **steps})
    return runs, {job.name: failed[job.entrant.type] for job in runs if job.entrant.type in failed}


def is_whole(known: dict[str, Any], jobs: list[ComparedRun]) -> bool:
    """Return whether an earlier measurement has the steps, or the failure, of each type."""
    steps, types = known["steps"].keys(), {job.entrant.type for job in jobs}
    return steps == known["step_seconds"].keys() and {*steps, *known["failed"]} == types


def measure(
    budget: float,
    jobs: list[ComparedRun],
    requested: ComparisonRequest,
    screen: Console,
    known: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Time each type with a short run, and return the steps that fit.

    The first short run also measures the time outside of steps.

    Args:
        known: results of an earlier measurement. Types that failed then are timed again, with the same time
            as the other types. The other types keep their steps and their runs.

    Raises:
        UserError: the budget is too short for FEWEST_STEPS of each type (exit 2).
    """
    started, known, failed = time.monotonic(), known or {}, {}
    kept, seconds = known.get("steps", {}), dict(known.get("step_seconds", {}))
    besides, place = known.get("besides_seconds"), requested.folder / ".pilot"
    for job in [job for job in jobs if job.seed == jobs[0].seed and job.entrant.type not in kept]:
        screen.say(f"measuring the time of {PILOT_STEPS} steps of {job.entrant.type} ...")
        clear(place)
        overrides = [
            *requested.overrides,
            *setting(job.entrant, job.seed, place),
            "train.warmup_steps=0",
            f"train.max_steps={PILOT_STEPS}",
            "train.logging_steps=1",
            "eval.eval_steps=null",
            "eval.early_stopping_patience=null",
            "eval.metric_for_best_model=loss",
        ]
        overrides += NO_EVALUATION if besides is not None else []
        recipe = load_recipe(requested.path, overrides)
        pilot = job._replace(recipe=recipe, folder=RunFolder(place), files=kept_runs.files_read(recipe))
        of_run = kept_runs.part("", place, PILOT_STEPS)
        with progress.phase(screen, f"measuring {job.entrant.type}", parts=1), of_run:
            reason = run_one(pilot)
        if reason:
            failed[job.entrant.type] = reason
            continue
        steps = collectives.from_main(pilot.folder.steps)
        seconds[job.entrant.type] = statistics.median(line["step_seconds"] for line in steps[-PILOT_TIMED:])
        if besides is None:
            whole = collectives.from_main(lambda folder=pilot.folder: folder.read(MARK, "mark")["seconds"])
            besides = whole - sum(line["step_seconds"] for line in steps)
    clear(place)
    spent = collectives.from_main(lambda: time.monotonic() - started)
    runs = sum(job.entrant.type in seconds for job in jobs)
    slowest = max(seconds.values(), default=0.0)
    share = (budget - spent) / max(runs, 1) - (besides or 0.0)
    share = max((count * seconds[kind] for kind, count in kept.items()), default=share)
    if runs and share < FEWEST_STEPS * slowest:
        least = spent + runs * ((besides or 0.0) + FEWEST_STEPS * slowest)
        minutes = f"{math.ceil(least / 60)}m"
        raise UserError(
            Problem(
                f"the budget is too small for {runs} runs of {FEWEST_STEPS} steps with their evaluations",
                where="--budget",
                found=f"{budget:.0f} s",
                expected=f"{minutes} or more",
                fix=f"--budget {minutes}",
                code="value-range",
            )
        )
    return {
        "steps": {kind: kept.get(kind) or int(share / each) for kind, each in seconds.items()},
        "step_seconds": seconds,
        "besides_seconds": besides,
        "failed": failed,
    }
