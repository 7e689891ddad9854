"""Correct what `auto` chose when the first step runs out of memory: stronger settings, and the run again.

The order is: more activation checkpointing, then smaller micro-batches with more accumulation, so that the
effective batch size stays. Settings that the recipe states stay as they are. The run starts again from its
recipe, so it computes what a run with the stronger settings computes:

- One process raises `StartAgain`, and `pipeline.run` builds the run anew.
- Several processes are replaced together (`distributed.restart_together`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import NamedTuple

from finetune.autoconfig import batch_size
from finetune.autoconfig.activation_checkpointing import stronger_level
from finetune.autoconfig.batch_size import Batch
from finetune.core.console import Console
from finetune.core.run_checks import Choice, RunChecks
from finetune.distributed import restart_together
from finetune.recipe.schema import Recipe

VARIABLE = "FINETUNE_AFTER_OUT_OF_MEMORY"
CHECKPOINTING, MICRO_BATCH = "speed.activation_checkpointing", "train.per_device_train_batch_size"
SET_BY = "auto after out of memory"
# What CUDA libraries say where torch's own allocator is not asked: NCCL, cuBLAS, cuDNN
_OTHERS = re.compile(r"out of memory|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|Failed to CUDA [cm]alloc")


class Change(NamedTuple):
    """One setting that `auto` corrected."""

    key: str
    before: str
    after: str


class Correction(NamedTuple):
    """The settings of a run that replace the choices of `auto` in its earlier attempts."""

    changes: tuple[Change, ...] = ()
    folder: str = ""
    """The run folder, in which a new process continues."""
    restarts: bool = False
    """The processes of a launch can be replaced together."""

    def value(self, key: str) -> str | None:
        """Return the setting's corrected value, or `None` where `auto` decides."""
        return next((change.after for change in reversed(self.changes) if change.key == key), None)

    def choice(self, key: str) -> Choice | None:
        """Return the corrected value with its reason."""
        value, tried = self.value(key), [change.before for change in self.changes if change.key == key]
        return (
            Choice(value, f"{SET_BY}: the first step did not fit with {', '.join(tried)}") if value else None
        )

    @property
    def micro_batch(self) -> int | None:
        value = self.value(MICRO_BATCH)
        return int(value) if value else None

    def add_run_checks(self, checks: RunChecks) -> None:
        """Record each correction as a run check."""
        for key, before, after in self.changes:
            checks.add(f"{key}, {SET_BY}", before, after, "the first step ran out of memory", ok=True)


NONE = Correction()


class StartAgain(Exception):
    """The run is to start again with this correction."""

    def __init__(self, correction: Correction) -> None:
        super().__init__(describe(correction.changes[-1]))
        self.correction = correction


class Corrector:
    """Start a run again whose first step ran out of memory."""

    def __init__(self, correction: Correction, screen: Console, *, alone: bool) -> None:
        """Args:
        correction: the settings of the next attempt.
        alone: this process is the only one of its run.
        """
        self.correction, self.screen = correction, screen
        self.watch = None if alone else restart_together.FirstStepWatch(VARIABLE, self.announce)

    def announce(self, text: str) -> None:
        """Say that the run starts again, on the screen and in log.txt."""
        self.screen.say(f"note: {describe(read(text).changes[-1])}")
        self.screen.flush()

    def takes(self, error: Exception, *, first_step: bool) -> bool:
        """Return whether `error` means that the first step ran out of memory."""
        if self.watch:
            self.watch.wait_if_requested()
        takes = first_step and out_of_memory(error)
        if self.watch and not takes:
            self.watch.closed.set()  # the error ends this process
        return takes

    def finish_first_step(self) -> None:
        """Say that this process needs no restart any more."""
        if self.watch:
            self.watch.finished.set()

    def start_again(self) -> None:
        """Start again. Returns only if the processes of a launch could not agree.

        Raises:
            StartAgain: in the only process of a run.
        """
        text = json.dumps(self.correction)
        if self.watch is None:
            self.announce(text)
            raise StartAgain(self.correction)
        self.watch.request(text)


def out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU had no memory left, by torch's allocator or by a library's own."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(_OTHERS.search(str(error)))
    )


def describe(change: Change) -> str:
    """One sentence about a correction."""
    again = f"`auto` takes {change.after} and starts the run again"
    if change.key == MICRO_BATCH:
        again += ", with the same effective batch size"
    return f"the first step ran out of memory with {change.key}: {change.before}; {again}"


def read(text: str) -> Correction:
    """Read a correction from JSON."""
    changes, folder, restarts = json.loads(text)
    return Correction(tuple(Change(*change) for change in changes), folder, restarts)


def from_environment() -> Correction:
    """Return the correction that an earlier attempt left to this process."""
    text = os.environ.pop(VARIABLE, "")  # not for the processes that this one starts
    return read(text) if text else Correction()


def next_change(
    recipe: Recipe,
    level: str,
    batch: Batch,
    allowed: Callable[[str], bool],
    *,
    fused_mlps: bool,
    offloads: bool,
) -> Change | None:
    """Return the next stronger setting, or `None` if `auto` has none left.

    Args:
        level: of activation checkpointing now.
        allowed: whether a run would accept a change such as `speed.activation_checkpointing=full`.
        fused_mlps: gate and up can be recomputed alone.
        offloads: activations leave the GPU.
    """
    if recipe.speed.activation_checkpointing == "auto":
        stronger = stronger_level(level, fused_mlps=fused_mlps, offloads=offloads)
        while stronger and not allowed(f"{CHECKPOINTING}={stronger}"):
            stronger = stronger_level(stronger, fused_mlps=fused_mlps, offloads=offloads)
        if stronger:
            return Change(CHECKPOINTING, level, stronger)
    if recipe.train.per_device_train_batch_size in (None, "auto"):
        smaller = batch_size.smaller_micro_batch(batch)
        if smaller:
            return Change(MICRO_BATCH, str(batch.per_device), str(smaller))
    return None
