"""Faults on purpose, to see that a run survives them: FINETUNE_FAULT=step:5:rank:1:kill

Several are separated by commas. Without that variable nothing here does anything. Kinds:

    kill    this process is killed (SIGKILL) before the step
    raise   an exception that nobody expects, before the step
    hang    this process sleeps for ever before the step
    nan     a gradient of the step becomes NaN, before ranks share theirs
    weight  a trained weight becomes NaN before the step
    input   a number that the model's first layer is given becomes infinite, in each forward of the step
    oom     the last forward and backward of the step runs out of memory, once;
            with `rows:4`, each of more than 4 rows does, from that step on
    disk    the checkpoint of the step, or the first one after it, finds the disk full

`rank` is 0 unless said; `life:1` is a fault of a run that torchrun has restarted once (0 unless said).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

VARIABLE = "FINETUNE_FAULT"
KINDS = ("kill", "raise", "hang", "nan", "weight", "input", "oom", "disk")
_NUMBERS = ("step", "rank", "rows", "life")


class Fault(NamedTuple):
    kind: str
    step: int = 1
    rank: int = 0
    rows: int = 0
    life: int = 0


class Injected(Exception):
    """The exception of `raise`."""


def planned(environment: Mapping[str, str] = os.environ) -> list[Fault]:
    """The faults of this process, in this life of it.

    Raises:
        UserError: a fault that can't be read (exit 2).
    """
    text = environment.get(VARIABLE, "")
    faults = [_read(part) for part in text.split(",") if part]
    rank, life = (int(environment.get(name, "0")) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    return [fault for fault in faults if (fault.rank, fault.life) == (rank, life)]


def _read(text: str) -> Fault:
    *places, kind = text.strip().split(":")
    names, values = places[::2], places[1::2]
    if kind not in KINDS or len(names) != len(values) or not set(names) <= set(_NUMBERS):
        expected = f"step:5:rank:1:kill; kinds: {', '.join(KINDS)}; numbers: {', '.join(_NUMBERS)}"
        raise UserError(Problem("not a fault", where=f"${VARIABLE}", found=text, expected=expected))
    if not all(value.isdecimal() for value in values):
        raise UserError(Problem("not a number", where=f"${VARIABLE}", found=text))
    return Fault(kind, **dict(zip(names, map(int, values), strict=True)))


def before_step(step: int, trained: Callable[[], dict[str, Any]]) -> None:
    """Strike before optimizer step `step` (from 1).

    Args:
        trained: the trained tensors by name, for `weight`.
    """
    for fault in planned():
        if fault.step != step:
            continue
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "raise":
            raise Injected(f"{VARIABLE}: before step {step}")
        elif fault.kind == "hang":
            while True:
                time.sleep(1)
        elif fault.kind == "weight":
            next(iter(trained().values())).data.view(-1)[0] = float("nan")


@contextlib.contextmanager
def in_forward(step: int, model: Any) -> Iterator[None]:
    """Strike while `model` computes a loss of step `step`."""
    if not any(fault.kind == "input" and fault.step == step for fault in planned()):
        yield
        return

    def spoilt(module: Any, given: Any, output: Any) -> Any:
        output = output.clone()
        output.view(-1)[0] = float("inf")
        return output

    hook = model.get_input_embeddings().register_forward_hook(spoilt, prepend=True)
    try:
        yield
    finally:
        hook.remove()


def before_update(step: int, trained: Callable[[], dict[str, Any]]) -> None:
    """Strike when this process's gradients of step `step` are whole."""
    if any(fault.kind == "nan" and fault.step == step for fault in planned()):
        next(p.grad for p in trained().values() if p.grad is not None).view(-1)[0] = float("nan")


def in_backward(step: int, rows: int, struck: set[int]) -> None:
    """Strike when a micro-batch of `rows` rows has left its gradients.

    Args:
        struck: steps at which memory has run out already; this one is added.
    """
    import torch

    for fault in planned():
        once = fault.rows == 0 and fault.step == step and step not in struck
        if fault.kind == "oom" and (once or (fault.rows and step >= fault.step and rows > fault.rows)):
            struck.add(step)
            raise torch.OutOfMemoryError(f"{VARIABLE}: {rows} rows in step {step}")


def in_save(step: int, failed: set[Fault]) -> None:
    """Strike when the checkpoint of `step` is written.

    Args:
        failed: faults of this process that have struck already; one that does now is added.
    """
    for fault in planned():
        if fault.kind == "disk" and step >= fault.step and fault not in failed:
            failed.add(fault)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
