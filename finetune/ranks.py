"""What the processes of one launch tell each other beside the training."""

from __future__ import annotations

import datetime
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

if TYPE_CHECKING:
    from collections.abc import Callable

AGREEMENT_SECONDS = 60  # that a process whose run failed waits for the others to say so too


@functools.cache
def failures() -> Any:
    """A group in which processes tell each other that they failed. All have to make it, before they do."""
    if PartialState().num_processes == 1:
        return None
    waits = datetime.timedelta(seconds=AGREEMENT_SECONDS)
    return torch.distributed.new_group(backend="gloo", timeout=waits)


@functools.cache
def steps() -> Any:
    """A group in which processes agree between steps, in the CPU's memory: no GPU is waited for."""
    return torch.distributed.new_group(backend="gloo") if PartialState().num_processes > 1 else None


def any_of(*flags: bool) -> list[bool]:
    """Each flag, as it is on any rank."""
    if PartialState().num_processes == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(raised, torch.distributed.ReduceOp.MAX, group=steps())
    return raised.bool().tolist()


def shared(reason: str) -> bool:
    """Whether the run failed on all processes for this reason, so that none still waits in the training."""
    processes = PartialState().num_processes
    if processes == 1:
        return True
    reasons: list[Any] = [None] * processes
    try:
        torch.distributed.all_gather_object(reasons, reason, group=failures())
    except RuntimeError:  # some did not come in time, or are gone
        return False
    return set(reasons) == {reason}


def from_main(value: Callable[[], Any]) -> Any:
    """What rank 0 alone reads or computes, for all ranks."""
    held = [value() if PartialState().is_main_process else None]
    if PartialState().num_processes > 1:
        broadcast_object_list(held)
    return held[0]
