"""One trial of `finetune sweep`: a run in its own process, read as it goes, told to end if it is poor."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import safe_files, signals
from finetune.core.errors import Exit
from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLL = 0.1  # seconds
AGAIN_AFTER, KILL_AFTER = 5.0, 60.0  # seconds from a SIGTERM to the next (leave now), and to SIGKILL
GROUPS, OWN_GROUPS = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
)  # what a container's memory is counted in
WARM = [
    "finetune.experiments.runner.exit_with_parent",
    "finetune.experiments.runner.preload_libraries",
]  # what a process imports that runs are forked from
# What a server imports that runs on GPUs are forked from: nothing that asks for a GPU, after which no forked
# process has one; bitsandbytes and torchao do while they are imported, which peft and the Trainer do
PRELOADED = [
    "finetune.experiments.runner.exit_with_parent",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
]


class Evaluation(NamedTuple):
    place: int
    """1, 2, 3 ... within the trial."""
    step: int
    value: float


class Ended(NamedTuple):
    """How a trial's process ended."""

    state: str
    """complete, pruned, failed, or lost: to be run again."""
    value: float | None
    reason: str
    """Empty for a complete one."""
    seconds: float
    started_seconds: float | None
    """From spawning the process to its first optimizer step."""


class Metrics:
    """metrics.jsonl, read as it grows."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.at = self.count = 0
        self.first: dict[str, Any] = {}
        """The first logged step."""

    def new(self) -> Iterator[Evaluation]:
        """The evaluations since the last call; a line that is still being written waits for the next."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.at)
            text, newline, _ = file.read().rpartition(b"\n")
        self.at += len(text) + len(newline)
        for line in text.splitlines():
            record = json.loads(line)
            if "loss" in record and not self.first:
                self.first = record
            if self.key in record and "loss" not in record:
                self.count += 1
                yield Evaluation(self.count, int(record["step"]), float(record[self.key]))


class Trial(NamedTuple):
    words: list[str]
    """Of `finetune train`."""
    folder: Path
    """The run folder."""
    log: Path
    """Where the output goes."""
    cpu: bool = False


def run(
    trial: Trial,
    key: str,
    judge: Callable[[Evaluation], str],
    waiting: Callable[[], tuple[str, str]],
) -> Ended:
    """Run `finetune train` to its end.

    Args:
        key: of the value in metrics.jsonl, and of the result.
        judge: why the run is to end after an evaluation; empty: it goes on.
        waiting: called between looks; why the run is to end (empty: it goes on), and as what.
    """
    words, folder, log, cpu = trial
    began, metrics, killed = time.monotonic(), Metrics(folder / "metrics.jsonl", key), killed_for_memory()
    state, reason, started = "", "", None
    evaluations: list[Evaluation] = []
    process = start(words, log, cpu=cpu)
    try:
        while code_of(process) is None and not reason:
            for evaluation in metrics.new():
                evaluations.append(evaluation)
                state, reason = "pruned", reason or judge(evaluation)
            if metrics.first and started is None:  # its first step began so long before it was logged
                first = metrics.first
                started = time.monotonic() - began - first["step"] * (first["step_seconds"] or 0.0)
            if not reason:
                reason, state = waiting()
            time.sleep(POLL)
    finally:  # also if this process is told to end
        end(process)
    evaluations += metrics.new()
    seconds, code = time.monotonic() - began, code_of(process)
    if code == 0:  # before it could be told to end
        value = result(folder, key, evaluations)
        reason = "" if math.isfinite(value) else f"{key} is {value}"
        return Ended("pruned" if reason else "complete", None if reason else value, reason, seconds, started)
    if not reason:
        starved = (killed_for_memory() or 0) > (killed or 0)
        state, reason = failure(code if code is not None else -signal.SIGKILL, log, starved=starved)
    with contextlib.suppress(OSError):
        safe_files.remove(folder, "checkpoints")  # it is not gone on with
    return Ended(state, None, reason, seconds, started)


def start(words: list[str], log: Path, *, cpu: bool) -> Any:
    """`finetune train` in a session of its own: Ctrl-C is for the study alone. It ends with the study."""
    process, line = begin_process(str(log), {}, cpu=cpu)
    line.send((["train", *words, "--quiet"], str(log), {}))
    return process


def begin_process(log: str, environment: dict[str, str], *, cpu: bool) -> tuple[Any, Any]:
    """A process that imports what a run needs, and waits for its command: itself, and the line to it.

    It is forked from a server that has imported libraries, which is most of a start.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM if cpu else PRELOADED)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() asks no GPU then
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=_command, args=(theirs, log, environment))
    with safe_files.open_log(log) as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # what libraries say while they are imported
        try:
            process.start()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            theirs.close()
    return process, ours


def _command(line: Any, log: str, environment: dict[str, str]) -> None:
    begin(log)
    os.environ.update(environment)
    import torch

    if not torch.cuda._is_in_bad_fork():
        with contextlib.suppress(Exception):  # the run itself says what can't be imported
            importlib.import_module("finetune.experiments.runner.preload_libraries")
    words, log, environment = line.recv()
    write_to(log)
    os.environ.update(environment)
    if torch.cuda._is_in_bad_fork():  # what was imported has asked for a GPU: imported anew, it takes longer
        os.execv(sys.executable, [sys.executable, "-m", "finetune", *words])
    sys.argv = ["finetune", *words]
    runpy.run_module("finetune", run_name="__main__", alter_sys=True)


def begin(log: str) -> None:
    """What a forked run begins with: a session of its own, its log, and Python's own way to start workers: it
    would have its server's, by which each worker of a data loader imports everything anew (13 s)."""
    os.setsid()  # Ctrl-C is for the command that makes runs
    tie()
    write_to(log)
    multiprocessing.set_start_method(None, force=True)


def write_to(log: str) -> None:
    """Let what this process says, and those that it starts, go to a file."""
    with safe_files.open_log(log) as sink:
        for number in (1, 2):
            os.dup2(sink.fileno(), number)


def tie() -> None:
    """Let this process end with the one that made it, however that ends."""
    signals.end_with_parent()
    above = multiprocessing.parent_process()
    if above is not None and not above.is_alive():  # it ended before that
        os._exit(Exit.STOPPED)


def code_of(process: Any) -> int | None:
    """Its exit code; negative: the signal that ended it; `None`: it runs."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def end(process: Any) -> None:
    """SIGTERM; again, which means at once; SIGKILL for what is left of it."""
    for number, patience in (
        (signal.SIGTERM, AGAIN_AFTER),
        (signal.SIGTERM, KILL_AFTER),
        (signal.SIGKILL, 5.0),
    ):
        deadline = time.monotonic() + patience
        with contextlib.suppress(ProcessLookupError):
            if code_of(process) is None:
                os.kill(process.pid, number)
        while code_of(process) is None and time.monotonic() < deadline:
            time.sleep(POLL)


def result(folder: Path, key: str, evaluations: list[Evaluation]) -> float:
    """The loss of the saved weights, opened again; of what eval.json lacks, the best evaluation."""
    if key == "eval_loss":
        return float(RunFolder(folder).read("eval.json")["tuned"]["loss"])
    return max((one.value for one in evaluations), default=math.nan)


def killed_for_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Processes of this one's control group that the system has ended for memory; `None`: not known.

    By cgroup v2 or v1, under the group's name or, in a container that has its own view, at the root.
    """
    if not own.exists():  # not Linux
        return None
    for line in own.read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, file = (groups / "memory", "memory.oom_control") if controllers else (groups, "memory.events")
        for path in (root / name.lstrip("/") / file, root / file):
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE) if path.exists() else None
            if found:
                return int(found[1])
    return None


def failure(code: int, log: Path, *, starved: bool = False) -> tuple[str, str]:
    """What a run that ended by itself counts as, and why.

    Out of memory and a loss that is not finite are the values' doing: pruned, and the sampler goes elsewhere.

    Args:
        starved: the system has ended a process for memory meanwhile.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    if starved and code not in [int(known) for known in Exit]:  # itself, or a process of its own
        return "pruned", f"out of the host's memory: the system ended it ({ending(code)})"
    if code < 0:
        hint = ": by the system, if memory ran out" if code == -signal.SIGKILL else ""
        return "failed", f"ended by {ending(code)}{hint}"
    if code == Exit.STOPPED:
        return "lost", "it was told to end, and not by the study"
    return ("pruned" if code == Exit.TRAINING else "failed"), f"exit {code}: {said(text)}"


def ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def said(text: str) -> str:
    """The errors that a run ended with, in one line; the last line of a traceback."""
    found = re.findall(r"^error: (.*)(?:\n  found: +(.*))?", text, re.MULTILINE)
    if found:
        return "; ".join(": ".join(filter(None, parts)) for parts in found)[:500]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"
