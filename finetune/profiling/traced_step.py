"""Time some steps of a run, and trace one."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.core import progress, upstream_private

WARM = 2  # steps before the timed ones


TIMED = 3


TRACED = {"cpu": 3, "cuda": 1}  # several steps on a CPU, to compare an operation with others of its kind


STEPS = WARM + TIMED + max(TRACED.values()) + 1  # steps of the run, which ends before its last step


class Traced(Exception):
    """Ends the run after the traced step."""


class Trace(TrainerCallback):
    """Time some steps, trace one step, and stop the run. It also counts padding."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.finished = 0
        """Number of finished steps, for the progress bar."""
        self.ended = self.begun = self.traced = self.lost = 0.0
        self.waits: list[float] = []
        self.steps: list[float] = []
        self.tokens = self.real = self.computed = self.scored = 0
        self.ranges: list[Any] = []
        self.profiler: Any = None
        self.attention = ""

    def shown(self) -> AbstractContextManager[None]:
        """Show the finished steps as a part of the current phase."""
        return progress.part("tracing a step", lambda: self.finished / STEPS)

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
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
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
        self.finished = state.global_step
        if self.profiler is not None:
            if state.global_step == WARM + TIMED + TRACED["cuda" if self.cuda else "cpu"]:
                self.leave()
                self.traced = self.own() - self.traced
                self.lost = max(0.0, time.perf_counter() - self.lost - self.traced)
                self.profiler.stop()
                raise Traced
        elif state.global_step > WARM:
            self.steps.append(self.ended - before)
