"""What the processes of one launch tell each other beside the training."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import os
import platform
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.distributed import distributed_c10d as c10d

from finetune.core import safe_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NEARLY = 0.9  # of the time that one waits for another
NEW_FILE_SECONDS = 60  # NFS may tell another machine so much later that a file is there
SEEN = ".seen.tmp"  # what rank 0 writes to ask who sees it
GLOO = "GLOO_SOCKET_IFNAME"
ELSEWHERE = "192.0.2.1"  # an address that no machine has (RFC 5737)
SHOWN, LONGEST = 5, 100  # facts in which processes differ, and characters of each, that an error shows
AGREEMENT_SECONDS = 60  # that a process whose run failed waits for the others to say so too


def timeout() -> datetime.timedelta:
    """How long one process waits for another, whatever they exchange by."""
    return datetime.timedelta(seconds=launch_environment.timeout_seconds())


def start(device: str) -> None:
    """Join the processes of a launch on CPUs: the Trainer gives its `ddp_timeout` to those on GPUs alone."""
    name_interface()
    if device == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        joined(device)


def joined(device: str) -> PartialState:
    """This process among those of its launch. The first of these objects decides for the process: how long
    one waits, and that it computes on a CPU, or Accelerate takes each for a launch of its own."""
    name_interface()
    later = datetime.timedelta(seconds=0 if device == "cpu" else launch_environment.NCCL_LATER)
    given: Any = {"timeout": timeout() + later} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {}
    return PartialState(cpu=device == "cpu", **given)


def name_interface() -> None:
    """Have gloo listen where other machines reach this one. Left alone it takes the address of the host's own
    name, which on many is 127.0.1.1."""
    sizes = [int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if sizes[0] == sizes[1] or GLOO in os.environ:
        return
    named = os.environ.get("NCCL_SOCKET_IFNAME", "")
    found = named if named in psutil.net_if_addrs() else interface_to(os.environ.get("MASTER_ADDR", ""))
    if found:
        os.environ[GLOO] = found


def interface_to(host: str) -> str:
    """The network interface by which packets to `host` leave; empty: not known. Nothing is sent.

    A name that means this machine itself leads nowhere else: then that of the default route.
    """
    with contextlib.suppress(OSError):
        own = _own_address(host)
        if own.startswith("127.") and host != "localhost" and not host.startswith("127."):
            own = _own_address(ELSEWHERE)
        for name, addresses in psutil.net_if_addrs().items():
            if any(one.address == own for one in addresses):
                return name
    return ""


def _own_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]


def watch() -> None:
    """Have Python say where each process is once they have nearly waited too long for each other.

    What the others know of one that hangs is only that it did not answer. To be called at every step; what
    says it is a thread of C's, which needs nothing of the process that hangs. One after another: the lines of
    two that write at once to one terminal are mixed.
    """
    if PartialState().num_processes > 1 and sys.__stderr__:
        rank, count = (int(os.environ.get(name, "1")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        share = NEARLY + (1 - NEARLY) / 2 * rank / count
        faulthandler.dump_traceback_later(share * launch_environment.timeout_seconds(), file=sys.__stderr__)


def given_up(seconds: float) -> bool:
    """Whether others of this machine have ended, waiting for this process, which stands so long in a step."""
    if PartialState().num_processes == 1 or seconds < NEARLY * launch_environment.timeout_seconds():
        return False
    beside = psutil.Process(os.getppid()).children()  # the launcher has no others
    return len(beside) < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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
    if PartialState().num_processes == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timeout())


def wait_alike() -> None:
    """Have all groups but that of `failures` wait as long as ours do: DeepSpeed's and those of a mesh, which
    context parallelism has, are made by torch's defaults, 10 minutes of NCCL and 30 of gloo."""
    if PartialState().num_processes == 1:
        return
    own = failures()
    for group, (backend, _) in list(c10d._world.pg_map.items()):
        later = datetime.timedelta(seconds=launch_environment.NCCL_LATER if "nccl" in backend else 0)
        if group is not own:
            c10d._set_pg_timeout(timeout() + later, group)


def any_of(*flags: bool) -> list[bool]:
    """Each flag, as it is on any rank."""
    if PartialState().num_processes == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(raised, torch.distributed.ReduceOp.MAX, group=steps())
    return raised.bool().tolist()


def all_of(flag: bool) -> bool:
    """Whether it is so on every rank."""
    return not any_of(not flag)[0]


def gathered(value: object) -> list[Any]:
    """What each rank has, by rank."""
    found: list[Any] = [value] * PartialState().num_processes
    if len(found) > 1:
        torch.distributed.all_gather_object(found, value, group=steps())
    return found


def gathered_on_main(value: object) -> list[Any]:
    """What each rank has, by rank; empty but on rank 0."""
    state = PartialState()
    if state.num_processes == 1:
        return [value]
    found: list[Any] = [None] * state.num_processes if state.is_main_process else []
    torch.distributed.gather_object(value, found or None, group=steps())
    return found


def tensors_on_main(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that ranks have on the CPU, by names that differ; empty but on rank 0. Sent one by one: they can be
    large, and a pickle of them would be held twice more."""
    given = gathered_on_main({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
    if not main():
        for tensor in own.values():
            torch.distributed.send(_bytes(tensor), 0, group=steps())
        return {}
    found = dict(own)
    for rank, shapes in enumerate(given[1:], start=1):
        for name, (shape, dtype) in shapes.items():
            found[name] = torch.empty(shape, dtype=dtype)
            torch.distributed.recv(_bytes(found[name]), rank, group=steps())
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def index() -> int:
    return PartialState().process_index


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


def agree(facts: dict[str, str]) -> None:
    """Check that all processes of the launch have the same facts.

    Args:
        facts: what a run depends on, by name, as this process has it.

    Raises:
        UserError: the same error on all processes, which names what differs (exit 2).
    """
    found = gathered(facts)
    names = sorted({name for each in found for name in each})
    differ = [name for name in names if len({each.get(name) for each in found}) > 1]
    if not differ:
        return
    values = []
    for name in differ[:SHOWN]:
        first = found[0].get(name)
        odd = next(rank for rank, each in enumerate(found) if each.get(name) != first)
        held = [f"rank {rank}: {str(found[rank].get(name, 'nothing'))[:LONGEST]}" for rank in (0, odd)]
        values.append(f"{name}: {', '.join(held)}")
    what = f"the processes of this launch differ in {', '.join(differ)}"
    fix = "the same recipe, command, data, checkout and environment on every machine"
    raise UserError(Problem(what, found="; ".join(values), fix=fix))


def on_one_disk(folder: Path) -> None:
    """All processes must see a file that rank 0 writes there: each reads what rank 0 saves.

    Not the file of the folder's lock, which ends when rank 0 closes it again (`run_folder.lock`).

    Raises:
        UserError: on all of them, with the machines that don't see it (exit 3).
    """
    if PartialState().num_processes == 1:
        return
    path, text = folder / SEEN, from_main(lambda: f"{os.getpid()} {time.time_ns()}")
    if main():
        safe_files.write_text(folder, SEEN, text)
    seen = appears(path, text)
    blind = sorted(set(gathered("" if seen else platform.node())) - {""})
    if main():
        safe_files.remove(folder, SEEN)
    if blind:
        what, fix = (
            "not all machines of this launch see the run's folder",
            "a folder on a disk that all share",
        )
        found = f"{folder.absolute()} of rank 0 is not there on {', '.join(blind)}"
        raise UserError(Problem(what, "train.output_dir", found=found, fix=fix), code=Exit.ENVIRONMENT)


def appears(path: Path, holds: str | None = None) -> bool:
    """Whether a file that another process has written is seen here, within a minute; to list its folder makes
    NFS look again."""
    until = time.monotonic() + NEW_FILE_SECONDS
    while not (path.is_file() and (holds is None or path.read_text(encoding="utf-8") == holds)):
        if time.monotonic() > until:
            return False
        time.sleep(1)
        for folder in (path.parent.parent, path.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
    return True


def end_together() -> None:
    """Wait until all have come here: rank 0 writes last words, and a launcher ends it when another leaves."""
    if PartialState().num_processes > 1:
        with contextlib.suppress(RuntimeError):  # one is gone
            torch.distributed.barrier(group=steps())


def main() -> bool:
    """Whether this is rank 0."""
    return PartialState().is_main_process


def wait(hours: int = 24) -> None:
    """Wait for all processes, one of which may be busy for long."""
    if PartialState().num_processes > 1:
        waits = datetime.timedelta(hours=hours)
        group: Any = torch.distributed.new_group(backend="gloo", timeout=waits)
        torch.distributed.barrier(group=group)


def from_main(value: Callable[[], Any]) -> Any:
    """What rank 0 alone reads or computes, for all ranks."""
    held = [value() if PartialState().is_main_process else None]
    if PartialState().num_processes > 1:
        broadcast_object_list(held)
    return held[0]
