"""`finetune profile`: trace a step of a recipe, show where the time goes, and suggest a change.

    finetune profile recipes/quickstart.yaml          # open DIR/trace.json in chrome://tracing or Perfetto
    nsys profile finetune profile recipes/quickstart.yaml      # on a GPU: forward, backward, optimizer

On a GPU, DIR/memory.pickle holds each allocation of the traced step, for pytorch.org/memory_viz.

The command trains a few steps of the recipe and saves nothing. After a warm-up it times some steps, and then
traces one step (three on a CPU). The wait for data comes from the timed steps, and all other figures come
from the traced steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import safe_files, upstream_private
from finetune.core.console import Console
from finetune.core.errors import Problem, Stopped, UserError
from finetune.hardware import detection
from finetune.launch import launcher
from finetune.planning import planner
from finetune.preflight import checker
from finetune.profiling import recommendations, roofline, trace_analysis
from finetune.profiling.trace_analysis import Ran
from finetune.profiling.traced_step import STEPS, Trace, Traced
from finetune.recipe import adapter_types, loader
from finetune.training import pipeline

SHOWN = {  # kind of operation -> its name in the table
    "products": "GEMMs",
    "memory-bound": "memory-bound kernels",
    "launch gaps": "idle",
    trace_analysis.COPIES: "copies between GPU and CPU",
}


class Profile(NamedTuple):
    """How the time of a step is spent."""

    seconds: float
    """Seconds of a timed step, from the end of the previous step."""
    shares: dict[str, float]
    """Share of that time by kind of work.

    The kinds are `products` (GEMMs), attention, memory-bound kernels, communication, copies to CPU memory and
    back (on a GPU), data wait, and `launch gaps` (idle time).
    """
    padding: float
    """Padding tokens as a share of the batch."""
    attention: str
    verdict: str
    lever: str
    trace: Path
    roofline: tuple[float, str] | None = None
    """Share of the machine's peak FLOP/s that GEMMs reach, and the name of the peak. `None` if not known."""
    model: float | None = None
    """FLOPs that the model needs, over the whole step, as a share of the bf16 peak."""
    memory: Path | None = None
    """Snapshot of the GPU's allocations. `None` on the CPU."""


def command(path: str, overrides: list[str], output: str | None, screen: Console) -> Profile:
    """Run `finetune profile`: check the recipe, trace a step, and print the result.

    Raises:
        UserError: `finetune train` would not accept the recipe, or the folder cannot be written (exit 2).
    """
    folder = Path(output or f"runs/profile-{Path(path).stem}")
    whole = loader.load(path, overrides)
    checker.check_without_examples(whole)
    made = not folder.exists()
    if folder.is_symlink():
        raise UserError(
            Problem(
                "the output folder is a link",
                where=str(folder),
                found=str(folder.resolve()),
                fix="name a folder with --output",
                why="finetune would replace files in another folder",
                code="unsafe-file",
            )
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            Problem(
                "finetune can't create the output folder",
                where=str(folder),
                found=error.strerror or str(error),
                fix="choose another folder with --output",
                code="path",
            )
        ) from error
    # use one process on one GPU, because the Trainer would use all GPUs
    given = launcher.launched() or "CUDA_VISIBLE_DEVICES" in os.environ
    alone = {} if given else {"CUDA_VISIBLE_DEVICES": "0"}
    os.environ.update(alone)
    try:
        found = run(path, overrides, str(folder))
    finally:
        for name in alone:
            del os.environ[name]
        if made:  # if the recipe is not valid, leave no empty folder
            with contextlib.suppress(OSError):
                folder.rmdir()
    few = adapter_types.in_few_steps(whole.adapter, STEPS)
    screen.say(*[f"note: the profile used {key}: {value}" for key, value in few.items()])
    show(screen, found)
    return found


def as_json(found: Profile) -> dict[str, Any]:
    """Return a profile with the field names of `finetune profile --json`."""
    return {
        "step_seconds": found.seconds,
        "shares": found.shares,
        "padding_share": found.padding,
        "attention": found.attention,
        "verdict": found.verdict,
        "suggestion": found.lever,
        "gemm_share_of_peak": found.roofline[0] if found.roofline else None,
        "model_flops_utilization": found.model,
        "trace": found.trace,
        "memory_snapshot": found.memory,
    }


def run(path: str, overrides: list[str], output: str, callbacks: Sequence[Any] = ()) -> Profile:
    """Trace a step of a recipe, and write trace.json to `output`.

    Args:
        callbacks: additional callbacks for the run.

    Raises:
        UserError: `finetune train` would not accept the recipe.
        Stopped: a signal arrived. No files are kept.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    machine = detection.detect()
    whole = loader.load(path, overrides)
    made = planner.make(whole, machine, 1)
    compiled = made.choices["compile"].value == "on"  # the same choice as for a run of full length
    cut = {
        "train.max_steps": STEPS,
        "train.warmup_steps": 0,
        "train.report_to": "none",
        "train.save_strategy": "no",
    }
    # Logging would count as a wait for data
    cut |= {
        "train.logging_steps": 1000,
        "train.logging_first_step": "false",
        "eval.eval_steps": "null",
        "eval.early_stopping_patience": "null",
        "eval.metric_for_best_model": "loss",
        "publish.repo": "null",
    }
    cut |= adapter_types.in_few_steps(whole.adapter, STEPS)
    temporary = tempfile.mkdtemp(dir=folder)
    compile_setting = compiled if whole.speed.compile == "auto" else whole.speed.compile
    cut |= {"speed.compile": str(compile_setting).lower(), "train.output_dir": json.dumps(f"{temporary}/run")}
    dropped = {*cut, "train.num_train_epochs"}
    kept = [text for text in overrides if text.partition("=")[0] not in dropped]
    trace = Trace(machine.device == "cuda")
    try:
        short = loader.load(path, [*kept, *(f"{key}={value}" for key, value in cut.items())])
        with trace.shown(), contextlib.suppress(Traced):
            pipeline.run(short, verbosity="quiet", callbacks=[*callbacks, trace])
    except Stopped as stopped:
        by = str(stopped).partition(";")[0]
        raise Stopped(f"{by}; a stopped profile is not saved, so run the same command again") from None
    finally:
        shutil.rmtree(temporary)
    assert trace.profiler is not None
    rank = int(os.environ.get("RANK", "0"))
    file = folder / (f"trace-{rank}.json" if rank else "trace.json")
    with safe_files.private_folder(folder, file.name) as private:
        trace.profiler.export_chrome_trace(str(private.path / file.name))
        safe_files.rename(folder, f"{private.name}/{file.name}", file.name)
    memory = snapshot(file.with_name(file.name.replace("trace", "memory")).with_suffix(".pickle"), trace.cuda)
    ran = trace_analysis.computed(trace.profiler.events(), cuda=trace.cuda, lost=trace.lost)
    found, seconds = shares(trace, ran), statistics.median(trace.steps)
    padding = 1 - trace.real / max(1, trace.tokens)
    reached, needed = roofline.roofline(trace, ran, whole, machine, seconds)
    verdict, lever = recommendations.judge(found, padding, trace.attention, whole, made, reached)
    return Profile(seconds, found, padding, trace.attention, verdict, lever, file, reached, needed, memory)


def snapshot(path: Path, cuda: bool) -> Path | None:
    """Write the allocations of the traced step in torch's format. Return `None` on the CPU."""
    if not cuda:
        return None
    with safe_files.private_folder(path.parent, path.name) as private:
        upstream_private.write_memory_snapshot(str(private.path / path.name))
        safe_files.rename(path.parent, f"{private.name}/{path.name}", path.name)
    upstream_private.record_memory(entries=None)
    return path


def shares(trace: Trace, ran: list[Ran]) -> dict[str, float]:
    """Return the shares of a timed step: data wait, operations by kind, and idle time.

    Communication and copies count only while the GPU computes nothing.
    """
    waited = statistics.median(trace.waits) / statistics.median(trace.steps)
    spent = trace_analysis.spent(ran)
    if not trace.cuda:
        del spent[trace_analysis.COPIES]
    rest = 1 - waited
    found = {name: rest * seconds / trace.traced for name, seconds in spent.items()}
    over = max(1.0, sum(found.values()) / rest)  # kernels of several streams overlap
    found = {name: share / over for name, share in found.items()}
    return {**found, "data wait": waited, "launch gaps": max(0.0, rest - sum(found.values()))}


def show(screen: Console, found: Profile) -> None:
    """Print the shares as a table, then the verdict and the suggestion."""
    spent = {name: share * found.seconds * 1e3 for name, share in found.shares.items()}
    rows = [
        (SHOWN.get(name, name), f"{found.shares[name]:.1%}", f"{ms:.4g}" if ms < 1000 else f"{ms:,.0f}")
        for name, ms in spent.items()
    ]
    screen.table(f"a step of {found.seconds:.4g} s", ("part", "share", "ms"), rows)
    screen.say(f"padding: {found.padding:.1%} of the tokens; attention: {found.attention}")
    known = f"{found.roofline[0]:.0%} of {found.roofline[1]}" if found.roofline else "an unknown share"
    needed = f"; MFU of the whole step: {found.model:.0%}" if found.model else ""
    screen.say(f"roofline: GEMMs reach {known}{needed}")
    held = f"{found.memory}, for pytorch.org/memory_viz" if found.memory else "none on the CPU"
    screen.say(f"memory snapshot: {held}")
    screen.say("", f"verdict: {found.verdict}", f"suggestion: {found.lever}", f"wrote {found.trace}")
