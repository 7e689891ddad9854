"""Measure a run: `finetune train` in a fresh process, with an ordinary run folder, and its figures.

`ablate.json` in the folder describes the run. A finished run with the same description is not repeated. The
process is forked from a server that has only imported libraries, which saves five to ten seconds per run. For
GPU runs the server cannot import all libraries. There, the process of the next run imports the remaining ones
while the current run trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import safe_files, signals
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, Stopped, UserError
from finetune.core.formatting import shortened
from finetune.core.paths import writing
from finetune.data import source_loading
from finetune.experiments.runner import kept_runs, varied_keys, worker_process
from finetune.hub import client
from finetune.recipe.adapter_types import in_few_steps
from finetune.recipe.loader import load as load_recipe
from finetune.recipe.schema import Adapter, Model, Train
from finetune.run_folder.run_folder import RunFolder

MARK = "ablate.json"
_POSITIVE = ("tokens_per_second", "step_seconds", "gpu_memory_gib", "host_memory_gib")
# With at least this many cores, a process that imports libraries does not slow down a measured run
CORES = 8
_waiting: list[tuple[Any, Any]] = []
"""The process of the next GPU run, and the pipe over which it receives its command."""
UNITS = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens per CPU second"}
# Values that are equal in all runs: no checkpoints, and only the evaluation of a few validation examples
ALIKE = {
    "train.logging_steps": 1,
    "train.save_strategy": "no",
    "train.report_to": "none",
    "eval.eval_steps": None,
    "eval.early_stopping_patience": None,
    "eval.metric_for_best_model": "loss",
    "eval.tasks": [],
    "eval.forgetting": False,
    "eval.samples": 0,
    "eval.generate": False,
    "data.validation_fraction": None,
    "publish.repo": None,
}


class RunCommand(NamedTuple):
    """The command of one run."""

    recipe: str
    overrides: list[str]
    """All overrides except the output folder."""
    folder: Path
    mixed_precision: str | None = None
    """Mixed precision of the launch. `None` means the default of the machine."""
    accelerate: str | None = None
    """An Accelerate config file, for several processes."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal stop the current run at its next step, and end this command with exit 75."""

    def heard(name: str) -> None:
        raise Stopped(f"stopped by {name}; run the same command again to continue after the finished runs")

    try:
        with signals.listening(heard):
            yield
    finally:
        while _waiting:
            process, line = _waiting.pop()
            process.terminate()
            process.join()
            line.close()


def length(steps: int, warm_up: int, adapter: Adapter) -> list[str]:
    """Return overrides for a run of `steps` steps.

    The learning rate warms up in the steps that do not count.
    """
    few = {"train.max_steps": steps, "train.warmup_steps": warm_up, **in_few_steps(adapter, steps)}
    return varied_keys.overrides({**ALIKE, **few})


def identity(job: RunCommand) -> str:
    """Return a hash of everything that determines a run's figures, except the machine.

    The hash covers the content of the run's files.
    """
    recipe = load_recipe(job.recipe, job.overrides)
    name = Path(recipe.data.validation or "").name  # without its folder, because results can be moved
    data = recipe.data.model_copy(update={"validation": name})
    config = client.sha256(Path(job.accelerate)) if job.accelerate else None
    moved = recipe.model_copy(update={"data": data})
    return kept_runs.identity(
        moved, list(kept_runs.contents(recipe.data).values()), [job.mixed_precision, config]
    )


def cut_held_out(name: str | None, place: Path, rows: int, screen: Console) -> str | None:
    """Write the first validation examples to a file. Only .jsonl files are supported; others give a note.

    Returns:
        The path of the file, or `None` if there is no file or the format is not supported.

    Raises:
        UserError: `place` cannot be created, or the validation file does not exist (exit 2).
    """
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
    if name is None or not rows:
        return None
    paths = source_loading.files(name, "data.validation") or []
    if not paths or any(path.suffix != ".jsonl" for path in paths):
        screen.say(f"note: the verdicts use the training loss, because data.validation is not .jsonl: {name}")
        return None
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open(encoding="utf-8")) for path in paths]
        lines = [line.rstrip("\n") for line in itertools.islice(itertools.chain(*files), rows)]
    safe_files.write_text(place, "validation.jsonl", "\n".join(lines) + "\n")
    return str(place / "validation.jsonl")


def make(job: RunCommand, *, cpu: bool) -> bool:
    """Run the job unless it is already finished without an error. Return whether it ran now.

    Raises:
        UserError: the run was stopped. The same command resumes (exit 75).
    """
    own, place = identity(job), RunFolder(job.folder)
    if kept_runs.clear_place(place, MARK, own) is None:
        return False
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    log = job.folder.with_name(f"{job.folder.name}.log")
    words = ["train", job.recipe, *job.overrides, kept_runs.in_folder(job.folder), "--quiet"]
    words += ["--accelerate", job.accelerate] if job.accelerate else []
    environment = {"ACCELERATE_MIXED_PRECISION": job.mixed_precision} if job.mixed_precision else {}
    if not cpu and not job.accelerate:  # use one process on one GPU, even if a scheduler assigned more GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    started = time.monotonic()
    steps = load_recipe(job.recipe, job.overrides).train.max_steps
    with kept_runs.part(f"{job.folder.parent.name}/{job.folder.name}", job.folder, steps):
        code = start(words, str(log), environment, cpu=cpu, more=True)
    if code in (Exit.STOPPED, 130, -2, -15):
        raise UserError(
            Problem(
                f"a signal stopped the run {job.folder.name}",
                where=str(job.folder),
                fix="run the same command again to continue",
                code="experiment",
            ),
            code=Exit.STOPPED,
        )
    kept_runs.check_unchanged({"its files": own}, {"its files": identity(job)}, job.folder)
    safe_files.make_folder(job.folder.parent, job.folder.name)
    failed = "" if code == 0 else why(log.read_text(encoding="utf-8", errors="replace"), code)
    mark = {
        "identity": own,
        "seconds": time.monotonic() - started,
        "failed": failed,
        "date": time.strftime("%Y-%m-%d"),
    }
    place.write(MARK, mark)
    return True


def start(words: list[str], log: str, environment: dict[str, str], *, cpu: bool, more: bool = False) -> int:
    """Run `python -m finetune WORDS` in a fresh process that ends with this process.

    Args:
        more: other runs on this GPU follow, so start the next process early to import libraries.

    Returns:
        The exit code. A negative value is the signal that ended the process.
    """
    gpu = {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"}
    ready = bool(gpu and _waiting and _waiting[-1][0].is_alive())
    process, line = _waiting.pop() if ready else worker_process.begin_process(log, gpu, cpu=cpu)
    if log != os.devnull:
        safe_files.open_append(Path(log).parent, Path(log).name).close()
    try:
        line.send((words, log, environment))
        if more and gpu and cores() >= CORES:
            _waiting.append(worker_process.begin_process(os.devnull, gpu, cpu=cpu))
        process.join()
    except KeyboardInterrupt:
        worker_process.end(process)
        raise
    return process.exitcode


def cores() -> int:
    """Return the number of CPU cores that this process can use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def why(log: str, code: int) -> str:
    """Return why a run failed, in one line."""
    if code < 0:
        hint = "; the system may have run out of memory" * (code == -9)
        return f"signal {-code} ended the run{hint}"
    return shortened(worker_process.said(log), 200)


def figures(folder: Path, warm_up: int) -> dict[str, Any]:
    """Return the figures of a run from its steps after the warm-up.

    Returns:
        For every run: `run`, `failed` (the reason or an empty string), `date` and `seconds` of the whole
        process.
        A run that did not fail also has:

        - `tokens_per_second`, `step_seconds`, `mfu`: medians over the steps.
        - `first_step_seconds`: seconds of the first step.
        - `memory_gib`: peak of the GPU allocator, or of the process on a CPU.
        - `losses`: training loss of each step.
        - `held_out`, `examples`: validation loss in total and for each example.
        - `tokens`: tokens per step.
        - `tokens_per_cpu_second`: median, `None` if a GPU trains.
        - `machine`: see `machine`.
    """
    place = RunFolder(folder)
    mark = {"failed": "", "date": "", **place.read(MARK, "mark")}
    lines = [] if mark["failed"] else place.measured_steps()
    steady = lines[warm_up:]
    odd = [key for key in _POSITIVE if not all(_is_positive(line[key]) for line in steady)]
    if not steady or odd:
        why_not = "the run has no step after the warm-up"
        why_not = f"metrics.jsonl has an impossible value of {odd[0]}" if odd else why_not
        return {
            "run": str(folder),
            "failed": mark["failed"] or why_not,
            "date": mark["date"],
            "seconds": mark["seconds"],
        }
    middle = {
        key: statistics.median(line[key] for line in steady) if steady[0][key] is not None else None
        for key in ("tokens_per_second", "step_seconds", "mfu")
    }
    each = itertools.pairwise(lines[max(0, warm_up - 1) :] if lines[0].get("cpu_seconds") is not None else [])
    rates = [
        (b["tokens"] - a["tokens"]) / (b["cpu_seconds"] - a["cpu_seconds"])
        for a, b in each
        if b["cpu_seconds"] > a["cpu_seconds"]
    ]
    held = "gpu_memory_gib" if lines[0]["gpu_memory_gib"] is not None else "host_memory_gib"
    return {
        "run": str(folder),
        "failed": "",
        "date": mark["date"],
        **middle,
        "first_step_seconds": lines[0]["step_seconds"],
        "memory_gib": max(line[held] for line in lines),
        "losses": [float(line["loss"]) for line in lines],  # NaN and Inf are stored as text
        "held_out": place.found("eval.json").get("tuned", {}).get("loss"),
        "examples": place.found("eval.json").get("examples"),
        "tokens": lines[-1]["tokens"] / len(lines),
        "tokens_per_cpu_second": statistics.median(rates) if rates else None,
        "seconds": mark["seconds"],
        "machine": machine(place),
    }


def _is_positive(value: float | None) -> bool:
    return value is None or (math.isfinite(value) and value > 0)


def dates(runs: Sequence[dict[str, Any]]) -> str:
    """Return the dates of the runs. Kept runs can be much older than the others."""
    days = sorted({run["date"] for run in runs})
    return " to ".join(dict.fromkeys([days[0], days[-1]]))


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the successful repeats. The losses come from the first run, which is evaluated."""
    runs = [run for run in runs if not run["failed"]]
    found = {
        k: statistics.median(run[k] for run in runs)
        for k in ("tokens_per_second", "step_seconds", "first_step_seconds", "memory_gib")
    }
    taken = [run["tokens_per_cpu_second"] for run in runs if run["tokens_per_cpu_second"]]
    mfu = [run["mfu"] for run in runs if run["mfu"] is not None]
    first = runs[0]
    return found | {
        "runs": len(runs),
        "all": [run["tokens_per_second"] for run in runs],
        "mfu": statistics.median(mfu) if mfu else None,
        "tokens_per_cpu_second": statistics.median(taken) if taken else None,
        "loss": statistics.mean(first["losses"][-2:]),
        "held_out": first["held_out"],
        "losses": first["losses"],
    }


def machine(place: RunFolder) -> dict[str, str]:
    """Return the facts that must be equal for figures to be comparable, with the checkpoint interval."""
    found = place.read("environment.json")
    here, launch = found["hardware"], found["launch"]
    recipe = load_recipe(place.recipe, (), place.format_version)
    held_out = {str(Path(recipe.data.validation).resolve())} if recipe.data.validation else set()
    sources = place.read("data_report.json")["train"].get("sources", {})
    files = sorted({digest for path, digest in sources.items() if path not in held_out})
    size = f"{here['cpu_cores']} cores, {here['memory_gib']:.0f} GiB"
    return {
        "hardware": f"{here['count']} x {here['name']}, {size}",
        "processes": str(launch["processes"]),
        "threads": launch.get("environment", {}).get("OMP_NUM_THREADS", "not set"),
        "model": model_of(recipe.model),
        "checkpoints": saves(recipe.train),
        **({"template date": recipe.data.template_date} if recipe.data.template_date else {}),
        "train files": hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12],
        **{name: str(version) for name, version in found["packages"].items()},
    }


def model_of(model: Model) -> str:
    """Return the identity of a recipe's model, independent of the path that names it."""
    name = os.path.realpath(model.name) if os.path.exists(model.name) else model.name
    return "@".join(filter(None, [name, model.revision]))


def saves(train: Train) -> str:
    """Return how often a recipe saves checkpoints."""
    steps = train.save_strategy == "steps" or (train.save_strategy == "auto" and train.save_steps is not None)
    return f"steps {train.save_steps or ''}".strip() if steps else train.save_strategy


def not_comparable(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Return why the figures of two machines cannot be compared. The list is empty if they can."""
    keys = dict.fromkeys([*a, *b])
    return [f"{key}: {a.get(key)} against {b.get(key)}" for key in keys if a.get(key) != b.get(key)]


def noise(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the relative standard deviation of one run, pooled over groups of repeats.

    Return `None` if there are no repeats.
    """
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) > 1:
            mean = statistics.mean(group)
            squares += sum((value / mean - 1) ** 2 for value in group)
            freedom += len(group) - 1
    return math.sqrt(squares / freedom) if freedom else None


def distance(losses: Sequence[float], of: Sequence[float]) -> float:
    """Return the distance of two loss curves: the mean absolute difference divided by the mean loss."""
    both = list(zip(losses, of, strict=False))
    if not both or not all(math.isfinite(value) for pair in both for value in pair):
        return math.inf
    return sum(abs(a - b) for a, b in both) / max(1e-12, sum(abs(b) for _, b in both))
