"""Communication between the processes of one launch, apart from the training itself."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch.distributed
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from finetune.core import safe_files, upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment

# Share of the timeout after which a process prints its stack.
NEARLY = 0.9
# NFS may show a new file to another machine only after this time.
NEW_FILE_SECONDS = 60
# The file that rank 0 writes to find out which machines see it.
SEEN = ".seen.tmp"
GLOO = "GLOO_SOCKET_IFNAME"
# An address that no machine has (RFC 5737).
ELSEWHERE = "192.0.2.1"
# Facts in which processes differ, and characters of each fact, that an error shows.
SHOWN, LONGEST = 5, 100
# Time that a failed process waits for the others to report their failure.
AGREEMENT_SECONDS = 60


def timeout() -> datetime.timedelta:
    """Return how long one process waits for another in any kind of communication."""
    return datetime.timedelta(seconds=launch_environment.timeout_seconds())


def start(device: str) -> None:
    """Join the processes of a launch on CPUs, because the Trainer applies its `ddp_timeout` only to GPUs."""
    launch_environment.check_launcher()
    name_interface()
    if device == "cpu" and launch_environment.processes() > 1:
        joined(device)


def joined(device: str) -> PartialState:
    """Return the `PartialState` of this process in its launch.

    The first `PartialState` of a process sets its timeout and its device. If it does not name the CPU in a
    run on CPUs, Accelerate takes each process for a launch of its own.
    """
    name_interface()
    launch_environment.check_launcher()
    later = datetime.timedelta(seconds=0 if device == "cpu" else launch_environment.NCCL_LATER)
    options: Any = {"timeout": timeout() + later} if launch_environment.processes() > 1 else {}
    return PartialState(cpu=device == "cpu", **options)


def name_interface() -> None:
    """Set the network interface on which gloo listens, so that other machines reach this one.

    By default, gloo takes the address of the host's own name, which is 127.0.1.1 on many hosts.
    """
    sizes = [int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if sizes[0] == sizes[1] or GLOO in os.environ:
        return
    named = os.environ.get("NCCL_SOCKET_IFNAME", "")
    interface = named if named in psutil.net_if_addrs() else interface_to(os.environ.get("MASTER_ADDR", ""))
    if interface:
        os.environ[GLOO] = interface


def interface_to(host: str) -> str:
    """Return the network interface for packets to `host`; the empty string if it is not known.

    If `host` is this machine, return the interface of the default route. No packet is sent.
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
    """Make each process print its stack shortly before the others give up waiting. Call this at every step.

    The others can only report that a process did not answer. A C thread prints the stack, so it works in a
    process that hangs. Processes print one after another, so that their lines do not mix on a terminal.
    """
    if PartialState().num_processes > 1 and sys.__stderr__:
        rank, count = (int(os.environ.get(name, "1")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        share = NEARLY + (1 - NEARLY) / 2 * rank / count
        faulthandler.dump_traceback_later(share * launch_environment.timeout_seconds(), file=sys.__stderr__)


def given_up(seconds: float) -> bool:
    """Return whether other processes of this machine have ended because they waited too long for this one.

    Args:
        seconds: how long this process has been in its step.
    """
    if PartialState().num_processes == 1 or seconds < NEARLY * launch_environment.timeout_seconds():
        return False
    beside = psutil.Process(os.getppid()).children()  # the launcher has no other children
    return len(beside) < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@functools.cache
def failures() -> Any:
    """Return the group in which processes report a failure. All processes must create it before a failure."""
    if PartialState().num_processes == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=AGREEMENT_SECONDS))


@functools.cache
def steps() -> Any:
    """Return the group in which processes agree between steps. It uses CPU memory, so no GPU synchronizes."""
    if PartialState().num_processes == 1:
        return None
    return torch.distributed.new_group(backend="gloo", timeout=timeout())


def wait_alike() -> None:
    """Give all process groups except `failures` the timeout of this launch.

    DeepSpeed and context parallelism create groups with torch's defaults: 10 minutes for NCCL and 30 minutes
    for gloo.
    """
    if PartialState().num_processes == 1:
        return
    own = failures()
    for group, backend in upstream_private.process_groups():
        later = datetime.timedelta(seconds=launch_environment.NCCL_LATER if "nccl" in backend else 0)
        if group is not own:
            upstream_private.set_group_timeout(timeout() + later, group)


def any_of(*flags: bool) -> list[bool]:
    """Return for each flag whether it is set on any rank."""
    if PartialState().num_processes == 1:
        return list(flags)
    raised = torch.tensor(flags, dtype=torch.int32)
    torch.distributed.all_reduce(raised, torch.distributed.ReduceOp.MAX, group=steps())
    return raised.bool().tolist()


def all_of(flag: bool) -> bool:
    """Return whether the flag is set on every rank."""
    return not any_of(not flag)[0]


def gathered(value: object) -> list[Any]:
    """Return the values of all ranks, in the order of ranks."""
    values: list[Any] = [value] * PartialState().num_processes
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value, group=steps())
    return values


def gathered_on_main(value: object) -> list[Any]:
    """Return the values of all ranks on rank 0, in the order of ranks, and an empty list on other ranks."""
    state = PartialState()
    if state.num_processes == 1:
        return [value]
    values: list[Any] = [None] * state.num_processes if state.is_main_process else []
    torch.distributed.gather_object(value, values or None, group=steps())
    return values


def tensors_on_main(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather the CPU tensors of all ranks on rank 0. Other ranks get an empty dict.

    Names must differ between ranks. Tensors are sent one by one, because a pickle of large tensors would need
    twice their memory.
    """
    shapes_of_ranks = gathered_on_main({name: (tensor.shape, tensor.dtype) for name, tensor in own.items()})
    if not main():
        for tensor in own.values():
            torch.distributed.send(_bytes(tensor), 0, group=steps())
        return {}
    full = dict(own)
    for rank, shapes in enumerate(shapes_of_ranks[1:], start=1):
        for name, (shape, dtype) in shapes.items():
            full[name] = torch.empty(shape, dtype=dtype)
            torch.distributed.recv(_bytes(full[name]), rank, group=steps())
    return full


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def index() -> int:
    return PartialState().process_index


def shared(reason: str) -> bool:
    """Return whether the run failed on all processes for this reason. Then no process waits in training."""
    processes = PartialState().num_processes
    if processes == 1:
        return True
    reasons: list[Any] = [None] * processes
    try:
        torch.distributed.all_gather_object(reasons, reason, group=failures())
    except RuntimeError:  # some processes did not answer in time, or ended
        return False
    return set(reasons) == {reason}


def agree(facts: dict[str, str]) -> None:
    """Check that all processes of the launch have the same facts.

    Args:
        facts: values of this process on which the run depends, by name.

    Raises:
        UserError: some facts differ. All processes raise the same error with these facts (exit 2).
    """
    by_rank = gathered(facts)
    names = sorted({name for rank_facts in by_rank for name in rank_facts})
    differ = [name for name in names if len({rank_facts.get(name) for rank_facts in by_rank}) > 1]
    if not differ:
        return
    values = []
    for name in differ[:SHOWN]:
        first = by_rank[0].get(name)
        odd = next(rank for rank, rank_facts in enumerate(by_rank) if rank_facts.get(name) != first)
        lines = [f"rank {rank}: {str(by_rank[rank].get(name, 'nothing'))[:LONGEST]}" for rank in (0, odd)]
        values.append(f"{name}: {', '.join(lines)}")
    raise UserError(
        Problem(
            f"the processes of this launch differ in {', '.join(differ)}",
            found="; ".join(values),
            fix="use the same recipe, command, data, checkout and environment on every machine",
            code="launch-config",
        )
    )


def on_one_disk(folder: Path) -> None:
    """Check that all processes see a file that rank 0 writes to a folder, because all read its files.

    The lock file of the folder can't be used: the lock ends when rank 0 closes the file (`run_folder.lock`).

    Raises:
        UserError: some machines do not see the file. All processes raise the same error (exit 3).
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
        raise UserError(
            Problem(
                "some machines of this launch do not see the run folder",
                "train.output_dir",
                found=f"rank 0 wrote to {folder.absolute()}, and {', '.join(blind)} can't read the file",
                fix="use a folder on a shared disk",
                code="run-folder",
            ),
            code=Exit.ENVIRONMENT,
        )


def appears(path: Path, holds: str | None = None) -> bool:
    """Return whether this machine sees a file of another process within a minute.

    Listing the folder makes NFS refresh it.
    """
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
    """Wait until all processes are here, because a launcher ends rank 0 when another process ends."""
    if PartialState().num_processes > 1:
        with contextlib.suppress(RuntimeError):  # a process has ended
            torch.distributed.barrier(group=steps())


def main() -> bool:
    """Return whether this process is rank 0."""
    return PartialState().is_main_process


def wait(hours: int = 24) -> None:
    """Wait for all processes, up to `hours`, because a process may be busy for a long time."""
    if PartialState().num_processes > 1:
        waits = datetime.timedelta(hours=hours)
        group: Any = torch.distributed.new_group(backend="gloo", timeout=waits)
        torch.distributed.barrier(group=group)


def from_main(value: Callable[[], Any]) -> Any:
    """Call `value` on rank 0 and return its result on all ranks."""
    box = [value() if PartialState().is_main_process else None]
    if PartialState().num_processes > 1:
        broadcast_object_list(box)
    return box[0]
