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
import math
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback

from finetune.autoconfig import memory_estimate
from finetune.core import safe_files, upstream_private
from finetune.core.console import Console
from finetune.core.errors import Problem, Stopped, UserError
from finetune.evaluation.scoring import memory_errors
from finetune.hardware import detection, gpus
from finetune.launch import launcher
from finetune.models import architecture
from finetune.planning import adapter_size, measured_rates, planner, step_time
from finetune.preflight import checker
from finetune.profiling import recommendations, trace_analysis
from finetune.recipe import adapter_types, loader
from finetune.training import pipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from finetune.hardware.detection import Hardware
    from finetune.profiling.trace_analysis import Ran
    from finetune.recipe.schema import Recipe

WARM, TIMED = 2, 3  # steps for warm-up and for timing, before the traced steps
TRACED = {"cpu": 3, "cuda": 1}  # several steps on a CPU, to compare an operation with others of its kind
SHOWN = {  # kind of operation -> its name in the table
    "products": "GEMMs",
    "memory-bound": "memory-bound kernels",
    "launch gaps": "idle",
    trace_analysis.COPIES: "copies between GPU and CPU",
}
STEPS = WARM + TIMED + max(TRACED.values()) + 1  # steps of the run, which ends before its last step


class Traced(Exception):
    """Ends the run after the traced step."""


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


class Trace(TrainerCallback):
    """Time some steps, trace one step, and stop the run. It also counts padding."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.ended = self.begun = self.traced = self.lost = 0.0
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.tokens = self.real = self.computed = self.scored = 0
        self.ranges: list[Any] = []
        self.profiler: Any = None
        self.attention = ""

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def own(self) -> float:
        """Return the current time for the traced step.

        On a CPU this is thread time, which excludes other processes.
        """
        return self.now() if self.cuda else time.thread_time()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Any = kwargs["model"]
        self.attention = upstream_private.attention_name(model.config.get_text_config()).removeprefix(
            "finetune_"
        )
        model.register_forward_pre_hook(self.count, with_kwargs=True)
        model.register_forward_pre_hook(lambda *_: self.enter("forward"))
        model.register_forward_hook(lambda *_: self.enter("backward"))

    def enter(self, name: str) -> None:
        """Start a named range of the traced step and end the previous one, for the trace and for nsys."""
        if self.profiler is not None:
            self.leave()
            self.ranges = [torch.profiler.record_function(name)]
            self.ranges += [torch.cuda.nvtx.range(name)] if self.cuda else []
            for part in self.ranges:
                part.__enter__()

    def leave(self) -> None:
        while self.ranges:
            self.ranges.pop().__exit__(None, None, None)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.enter("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.leave()

    def count(self, module: object, given: object, inputs: dict[str, Any]) -> None:
        """Count the tokens of a batch, and the tokens that are not padding."""
        if self.profiler is not None and "input_ids" in inputs:
            size, labels = inputs["input_ids"].numel(), inputs.get("labels")
            self.computed += size
            self.scored += size if labels is None else int((labels != -100).sum())
        elif "input_ids" in inputs:
            self.tokens += inputs["input_ids"].numel()
            mask = inputs.get("attention_mask")
            self.real += inputs["input_ids"].numel() if mask is None else int(mask.sum())

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.begun = self.now()
        if state.global_step > WARM and self.profiler is None:
            self.waits.append(self.begun - self.ended)
        if state.global_step == WARM + TIMED:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if self.cuda else []
            self.profiler = torch.profiler.profile(activities=kinds, record_shapes=True, acc_events=True)
            if self.cuda:
                upstream_private.record_memory(entries=100_000)
            self.profiler.start()
            self.traced, self.lost = self.own(), time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        before, self.ended = self.ended, self.now()
        if self.profiler is not None:
            if state.global_step == WARM + TIMED + TRACED["cuda" if self.cuda else "cpu"]:
                self.leave()
                self.traced = self.own() - self.traced
                self.lost = max(0.0, time.perf_counter() - self.lost - self.traced)
                self.profiler.stop()
                raise Traced
        elif state.global_step > WARM:
            self.steps.append(self.ended - before)


def command(path: str, overrides: list[str], output: str | None, *, quiet: bool) -> Profile:
    """Run `finetune profile`: check the recipe, trace a step, and print the result.

    Raises:
        UserError: `finetune train` would not accept the recipe, or the folder cannot be written (exit 2).
    """
    folder = Path(output or f"runs/profile-{Path(path).stem}")
    whole = loader.load(path, overrides)
    checker.run(whole)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = error.strerror or str(error)
        what, fix = "finetune can't create the output folder", "choose another folder with --output"
        raise UserError(Problem(what, "", str(folder), found, fix=fix, code="path")) from error
    # use one process on one GPU, because the Trainer would use all GPUs
    given = launcher.launched() or "CUDA_VISIBLE_DEVICES" in os.environ
    alone = {} if given else {"CUDA_VISIBLE_DEVICES": "0"}
    os.environ.update(alone)
    try:
        with memory_errors():
            found = run(path, overrides, str(folder))
    finally:
        for name in alone:
            del os.environ[name]
        if made:  # if the recipe is not valid, leave no empty folder
            with contextlib.suppress(OSError):
                folder.rmdir()
    if os.environ.get("RANK", "0") == "0":
        screen, few = Console(quiet=quiet), adapter_types.in_few_steps(whole.adapter, STEPS)
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


def run(path: str, overrides: list[str], output: str, watchers: Sequence[Any] = ()) -> Profile:
    """Trace a step of a recipe, and write trace.json to `output`.

    Args:
        watchers: additional callbacks for the run.

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
    cut |= {"train.logging_steps": 1000, "train.logging_first_step": "false"}
    cut |= {
        "eval.eval_steps": "null",
        "eval.early_stopping_patience": "null",
        "eval.metric_for_best_model": "loss",
        "publish.repo": "null",
    }
    cut |= adapter_types.in_few_steps(whole.adapter, STEPS)
    temporary = tempfile.mkdtemp(dir=folder)
    asked = compiled if whole.speed.compile == "auto" else whole.speed.compile
    cut |= {"speed.compile": str(asked).lower(), "train.output_dir": f"{temporary}/run"}
    dropped = {*cut, "train.num_train_epochs"}
    kept = [text for text in overrides if text.partition("=")[0] not in dropped]
    trace = Trace(machine.device == "cuda")
    try:
        short = loader.load(path, [*kept, *(f"{key}={value}" for key, value in cut.items())])
        with contextlib.suppress(Traced):
            pipeline.run(short, quiet=True, watchers=[*watchers, trace])
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
    reached, needed = roofline(trace, ran, whole, machine, seconds)
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


def roofline(
    trace: Trace, ran: list[Ran], whole: Recipe, machine: Hardware, seconds: float
) -> tuple[tuple[float, str] | None, float | None]:
    """Return the share of the peak that GEMMs reach with the peak's name, and the model's FLOPs as a share.

    The first share counts all executed GEMMs by their shapes, over their own time. This includes recomputed
    layers, and the output head for all tokens. The second share counts the FLOPs of the plan over the whole
    step, without recomputation, and the head only for tokens that contribute to the loss. The peak comes from
    `finetune doctor --measure` at shapes like the model's, or from the GPU's data sheet. A CPU without a
    measurement is timed now (0.3 s).

    A share is `None` if the GPU is not in the table, if the shapes of GEMMs are unknown, or if the model's
    GEMMs are unknown.
    """
    found = architecture.read(whole.model)
    one = memory_estimate.widths(found.config)
    peak, fp8, source = peaks(machine, one)
    if not peak:
        return None, None
    share = trace_analysis.of_peak(ran, peak, fp8)
    coded = f" ({fp8 / 1e12:,.4g} in fp8)" if fp8 and trace_analysis.in_fp8(ran) else ""
    reached = (share, f"{peak / 1e12:,.3g} TFLOP/s{coded}, {source}") if share else None
    if found.unknown:
        return reached, None
    has = adapter_size.adapted(whole.adapter, whole.model, found, 100)
    full = whole.adapter.type == "full"
    each, head = step_time.flops(found, has, full), (6.0 if full else 4.0) * one.vocabulary * one.hidden
    work = (each - head) * trace.computed + head * trace.scored
    return reached, work / TRACED[machine.device] / seconds / peak


def peaks(machine: Hardware, one: memory_estimate.Widths) -> tuple[float, float | None, str]:
    """Return peak FLOP/s of GEMMs, the fp8 peak if there is one, and their source. 0 means not known."""
    known, gpu = measured_rates.read_for(machine.name, one)[0], gpus.of_device(machine.name)
    if known:
        return known["product"], known.get("fp8"), "measured by `finetune doctor --measure`"
    if gpu:
        return gpu.bf16, gpu.fp8, "from its data sheet"
    if machine.device == "cpu":
        return ceiling(), None, "measured now with a large GEMM"
    return 0.0, None, ""


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


def ceiling() -> float:
    """Return the FLOP/s of a large square fp32 GEMM on this CPU: the best of many, in thread time."""
    width = 1024
    x, weight = torch.randn(width, width), torch.randn(width, width)
    best, until = math.inf, time.perf_counter() + 0.3
    while time.perf_counter() < until or best == math.inf:
        begun = time.thread_time()
        torch.nn.functional.linear(x, weight)
        best = min(best, time.thread_time() - begun)
    return 2.0 * width**3 / best


def show(screen: Console, found: Profile) -> None:
    """Print the shares as a table, then the verdict and the suggestion."""
    rows = [
        (SHOWN.get(name, name), f"{share:.1%}", f"{share * found.seconds * 1e3:.1f}")
        for name, share in found.shares.items()
    ]
    screen.table(f"a step of {found.seconds:.3f} s", ("part", "share", "ms"), rows)
    screen.say(f"padding: {found.padding:.1%} of the tokens; attention: {found.attention}")
    known = f"{found.roofline[0]:.0%} of {found.roofline[1]}" if found.roofline else "an unknown share"
    needed = f"; MFU of the whole step: {found.model:.0%}" if found.model else ""
    screen.say(f"roofline: GEMMs reach {known}{needed}")
    held = f"{found.memory}, for pytorch.org/memory_viz" if found.memory else "none on the CPU"
    screen.say(f"memory snapshot: {held}")
    screen.say("", f"verdict: {found.verdict}", f"suggestion: {found.lever}", f"wrote {found.trace}")
