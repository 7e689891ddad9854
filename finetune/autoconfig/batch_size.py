"""Split the effective batch size over processes and forward passes, and count the steps of a run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from finetune.recipe.schema import Train

# Share of the memory that a search may fill. Fragmentation and evaluation need the rest.
MARGIN = 0.9
# The largest micro-batch size that a search tries. A larger one does not use a GPU better.
MOST = 64
# Fewer optimizer steps than this get a note, which suggests epochs for about `ENOUGH_STEPS`.
FEW_STEPS, ENOUGH_STEPS = 20, 50


class Batch(NamedTuple):
    """The batch of an optimizer step."""

    effective: int
    """Sequences of an optimizer step over all processes."""
    per_device: int
    """Micro-batch size: sequences of one forward pass of one process."""
    accumulation: int
    """Forward passes of an optimizer step."""


def split_batch(train: Train, processes: int) -> Batch:
    """Split the effective batch size into processes, micro-batches and gradient accumulation.

    Raises:
        UserError: the processes or the micro-batch size do not divide the effective batch size (exit 2).
    """
    requested = train.per_device_train_batch_size
    # `auto` starts with one sequence.
    effective, stated = train.effective_batch_size, 1 if requested == "auto" else requested
    unit = processes * (stated or 1)
    if effective % unit:
        low, high = effective // unit * unit, (effective // unit + 1) * unit
        by = "process" if processes == 1 else "processes"
        key, what = "train.effective_batch_size", f"{effective} is no multiple of {processes} {by}"
        what += f" x micro-batch size {stated}" if stated else ""
        raise UserError(
            Problem(
                what,
                key,
                found=f"{effective} sequences",
                expected=f"{f'{low} or ' if low else ''}{high} sequences",
                why="each process needs the same number of sequences per step",
                fix=f"{key}: {low or high}",
                code="batch-size",
            )
        )
    share = effective // processes
    per_device = stated or max(size for size in range(1, 9) if share % size == 0)
    return Batch(effective, per_device, share // per_device)


def steps_between(setting: float, steps: int) -> int:
    """Return the steps between two saves or evaluations, or of the warm-up, as transformers counts them.

    Args:
        setting: a number of steps, or a number below 1 that is a share of the run.
        steps: the steps of the run.
    """
    return int(setting) if setting >= 1 else math.ceil(setting * steps)


def with_micro_batch(batch: Batch, per_device: int) -> Batch:
    """Return the same effective batch with another micro-batch size."""
    return Batch(batch.effective, per_device, batch.per_device * batch.accumulation // per_device)


def smaller_micro_batch(batch: Batch) -> int | None:
    """Return the next smaller micro-batch size, about half; `None` if the micro-batch is one sequence.

    The result divides the sequences that a process takes in a step.
    """
    share = batch.per_device * batch.accumulation
    return max((n for n in range(1, batch.per_device // 2 + 1) if share % n == 0), default=None)


def most_processes(train: Train, devices: int) -> tuple[int, str]:
    """Return the largest number of processes that divides the effective batch size, one process per device.

    Returns:
        The number, and why some devices stay unused; the empty string if all are used.
    """
    effective, stated = train.effective_batch_size, train.per_device_train_batch_size
    rows = stated if isinstance(stated, int) else 1
    processes = max((n for n in range(1, devices + 1) if effective % (n * rows) == 0), default=1)
    if processes == devices:
        return devices, ""
    by = f"{devices} x {rows}" if rows > 1 else str(devices)
    return (
        processes,
        f"auto: {processes} of {devices} GPUs, because {by} does not divide effective_batch_size {effective}",
    )


def sizes(share: int, most: int) -> list[int]:
    """Return the micro-batch sizes that `per_device_train_batch_size: auto` tries, in ascending order.

    Args:
        share: sequences that a process takes in a step.
        most: the largest size to try.
    """
    return [n for n in range(1, min(share, MOST, most) + 1) if share % n == 0]


def steps_of_stream(train: Train) -> int:
    """Return the optimizer steps of a run on streamed data.

    Raises:
        UserError: the recipe has no `max_steps`, or saves at the end of epochs (exit 2).
    """
    if train.save_strategy == "epoch":
        raise UserError(
            Problem(
                "the end of an epoch of streamed data is not known",
                "train.save_strategy",
                found="epoch",
                expected="steps, auto or no",
                fix="train.save_strategy: steps",
                code="recipe-conflict",
            )
        )
    if train.max_steps is None:
        raise UserError(
            Problem(
                "a run on streamed data needs a number of steps",
                "train.max_steps",
                why="the number of examples is not known before the stream ends",
                fix="train.max_steps: 1000",
                code="missing-key",
            )
        )
    return train.max_steps


def count_steps(train: Train, rows: int | None, batch: Batch, processes: int) -> int:
    """Count the optimizer steps of the run as the Trainer does. A run check compares both numbers.

    Args:
        rows: the number of training sequences; `None` if the data is streamed.

    Raises:
        UserError: there are fewer sequences than one step takes, or only a warm-up step (exit 2).
    """
    if rows is None:
        return steps_of_stream(train)
    if rows < batch.effective:
        raise UserError(too_few(rows, batch.effective))
    whole = math.floor if train.passed_on().get("dataloader_drop_last") else math.ceil
    micro_batches = math.ceil(whole(rows / batch.per_device) / processes)
    steps_an_epoch = max(1, math.ceil(micro_batches / batch.accumulation))
    steps = train.max_steps or math.ceil(train.epochs * steps_an_epoch)
    check_warm_up(train, steps)
    return steps


def check_warm_up(train: Train, steps: int | None) -> None:
    """Refuse a warm-up that leaves no step with a learning rate above 0 (exit 2).

    Args:
        steps: the steps of the run; `None`: not known.
    """
    warm_up = _warm_up(train)
    if steps == 1 and warm_up:
        raise UserError(
            Problem(
                "the only step is a warm-up step with learning rate 0",
                "train.warmup_steps",
                found=f"{warm_up:g} warm-up steps in a run of one step",
                fix="train.warmup_steps: 0",
                code="recipe-conflict",
            )
        )


def too_few(rows: int, effective: int) -> Problem:
    """Return the problem of data that does not fill one step."""
    fits = next((size for size in range(rows, 0, -1) if effective % size == 0), 1)
    return Problem(
        f"one step needs {effective} sequences, and the training data has {rows}",
        "train.effective_batch_size",
        found=f"{effective} sequences",
        fix=f"train.effective_batch_size: {fits}"
        if rows
        else "add examples, or lower data.validation_fraction",
        code="batch-size",
    )


def short_of_peak(train: Train, steps: int) -> list[str]:
    """Return a warning if the schedule has no warm-up, or if the learning rate never reaches its peak.

    The peak is never reached if the run ends during the warm-up, or if the decay begins during it.
    """
    warm_up_setting = _warm_up(train)
    if not warm_up_setting and train.passed_on().get("warmup_steps"):
        return ["train.warmup_steps: the schedule constant has no warm-up; use constant_with_warmup"]
    warm_up = steps_between(warm_up_setting, steps)
    if warm_up < steps:
        decay = _decay(train)
        said = f"the run has {steps:,} steps, of which {warm_up:,} are warm-up and {decay:,} are decay"
        return [f"the learning rate never reaches its peak: {said}"] if warm_up + decay > steps else []
    said = f"the warm-up takes {warm_up:,} steps, and the run has {steps:,}"
    return [f"the learning rate never reaches its peak: {said}"]


def few_steps(train: Train, steps: int | None) -> list[str]:
    """Return a note if the epochs of a recipe have few optimizer steps. With `max_steps`, return none."""
    if steps is None or steps >= FEW_STEPS or train.max_steps is not None:
        return []
    enough = math.ceil(train.epochs * ENOUGH_STEPS / steps)
    epochs = "an epoch has" if train.epochs == 1 else f"{train.epochs:g} epochs have"
    what = f"{epochs} {steps} optimizer steps"
    return [f"train.num_train_epochs: {what}, often too few to learn; try num_train_epochs: {enough}"]


def _warm_up(train: Train) -> float:
    """Return `train.warmup_steps`, a share of the run if it is below 1. A constant schedule has 0."""
    train_keys = train.passed_on()
    return 0 if train_keys.get("lr_scheduler_type") == "constant" else train_keys.get("warmup_steps") or 0


def _decay(train: Train) -> int:
    """Return the decay steps of `warmup_stable_decay` if the decay ends with the run; else 0.

    A long decay can then begin during the warm-up.
    """
    train_keys = train.passed_on()
    options = train_keys.get("lr_scheduler_kwargs") or {}
    decay = options.get("num_decay_steps") if options.get("num_stable_steps") is None else 0
    if train_keys.get("lr_scheduler_type") != "warmup_stable_decay" or not isinstance(decay, int):
        return 0
    return decay
