"""Run one trial of `finetune sweep` in a separate process, read its metrics, and stop it if it is poor."""

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
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import safe_files, signals, upstream_private
from finetune.core.errors import Exit
from finetune.run_folder.run_folder import RunFolder

POLL = 0.1  # seconds
# Seconds between the first SIGTERM, the second SIGTERM (exit now), and SIGKILL
AGAIN_AFTER, KILL_AFTER = 5.0, 60.0
GROUPS, OWN_GROUPS = (
    Path("/sys/fs/cgroup"),
    Path("/proc/self/cgroup"),
)  # locations of the cgroup files that count a container's memory
WARM = [
    "finetune.experiments.runner.exit_with_parent",
    "finetune.experiments.runner.preload_libraries",
]  # modules that the fork server for CPU runs imports
# Modules that the fork server for GPU runs imports. They must not initialize CUDA, because a forked process
# could not use a GPU then. bitsandbytes and torchao initialize CUDA when peft and the Trainer import them.
PRELOADED = [
    "finetune.experiments.runner.exit_with_parent",
    upstream_private.PRELOADED,
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
]


class Evaluation(NamedTuple):
    place: int
    """Number of the evaluation within the trial, from 1."""
    step: int
    value: float
    best_step: int | None = None
    """The step whose weights would be saved; `None`: the last step."""


class Ended(NamedTuple):
    """The result of a trial's process."""

    state: str
    """complete, pruned, failed or lost. The study runs a lost trial again."""
    value: float | None
    reason: str
    """Empty for a complete trial."""
    seconds: float
    started_seconds: float | None
    """Seconds from starting the process to its first optimizer step."""


class Metrics:
    """Reads metrics.jsonl while the run writes it."""

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key = path, key
        self.at = self.count = 0
        self.first: dict[str, Any] = {}
        """The record of the first logged step."""

    def new(self) -> Iterator[Evaluation]:
        """Yield the evaluations since the last call. An incomplete line is read by a later call."""
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
                step, value = int(record["step"]), float(record[self.key])
                yield Evaluation(self.count, step, value, record.get("best_step"))


class Trial(NamedTuple):
    words: list[str]
    """Arguments of `finetune train`."""
    folder: Path
    """The run folder."""
    log: Path
    """File for the output."""
    cpu: bool = False


def run(
    trial: Trial,
    key: str,
    judge: Callable[[Evaluation], str],
    waiting: Callable[[], tuple[str, str]],
) -> Ended:
    """Run `finetune train` to its end.

    Args:
        key: name of the metric in metrics.jsonl, and of the result.
        judge: called after each evaluation. It returns why the run must end, or an empty string.
        waiting: called between checks. It returns why the run must end, or an empty string, and the resulting
            state.
    """
    words, folder, log, cpu = trial
    began, metrics, killed = time.monotonic(), Metrics(folder / "metrics.jsonl", key), killed_for_memory()
    state, reason, started = "", "", None
    evaluations: list[Evaluation] = []
    process = start(words, log, cpu=cpu)
    try:
        while process.exitcode is None and not reason:
            for evaluation in metrics.new():
                evaluations.append(evaluation)
                state, reason = "pruned", reason or judge(evaluation)
            if metrics.first and started is None:  # the first step started before its record was logged
                first = metrics.first
                started = time.monotonic() - began - first["step"] * (first["step_seconds"] or 0.0)
            if not reason:
                reason, state = waiting()
            time.sleep(POLL)
    finally:  # also if this process receives a signal
        end(process)
    evaluations += metrics.new()
    seconds, code = time.monotonic() - began, process.exitcode
    if code == 0:  # the run finished before it could be stopped
        value = result(folder, key, evaluations)
        reason = "" if math.isfinite(value) else f"{key} is {value}"
        return Ended("pruned" if reason else "complete", None if reason else value, reason, seconds, started)
    if not reason:
        state, reason = failure(
            code if code is not None else -signal.SIGKILL,
            log,
            starved=(killed_for_memory() or 0) > (killed or 0),
        )
    with contextlib.suppress(OSError):
        safe_files.remove(folder, "checkpoints")  # the run will not be resumed
    return Ended(state, None, reason, seconds, started)


def start(words: list[str], log: Path, *, cpu: bool) -> BaseProcess:
    """Start `finetune train` in a separate session, so that Ctrl-C reaches only the study.

    The process ends with the study.
    """
    process, line = begin_process(str(log), {}, cpu=cpu)
    line.send((["train", *words, "--quiet"], str(log), {}))
    return process


def begin_process(log: str, environment: dict[str, str], *, cpu: bool) -> tuple[Any, Any]:
    """Start a process that imports the libraries of a run and then waits for its command.

    The process is forked from a server that has already imported libraries, which saves most of the start
    time.

    Returns:
        The process, and the pipe for its command.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM if cpu else PRELOADED)
    # torch.cuda.is_available() then does not initialize CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    theirs, ours = context.Pipe(duplex=False)
    process = context.Process(target=_command, args=(theirs, log, environment))
    with safe_files.open_log(log) as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)  # send the messages of imports to the log
        try:
            process.start()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            theirs.close()
    return process, ours


def _command(line: Connection, log: str, environment: dict[str, str]) -> None:
    begin(log)
    os.environ.update(environment)

    if not upstream_private.cuda_was_used_before_fork():
        with contextlib.suppress(Exception):  # the run itself reports import errors
            importlib.import_module("finetune.experiments.runner.preload_libraries")
    words, log, environment = line.recv()
    write_to(log)
    os.environ.update(environment)
    # An import has initialized CUDA, so start a new interpreter, which takes longer
    if upstream_private.cuda_was_used_before_fork():
        os.execv(sys.executable, [sys.executable, "-m", "finetune", *words])
    sys.argv = ["finetune", *words]
    runpy.run_module("finetune", run_name="__main__", alter_sys=True)


def begin(log: str) -> None:
    """Prepare a forked run: a new session, its log, and Python's default start method for workers.

    Each data loader worker would import all libraries again (13 s) with the inherited start method.
    """
    os.setsid()  # Ctrl-C is for the parent command only
    tie()
    write_to(log)
    multiprocessing.set_start_method(None, force=True)


def write_to(log: str) -> None:
    """Redirect the output of this process and its children to a file."""
    with safe_files.open_log(log) as sink:
        for number in (1, 2):
            os.dup2(sink.fileno(), number)


def tie() -> None:
    """End this process when its parent ends, for any reason."""
    signals.end_with_parent()
    above = multiprocessing.parent_process()
    if above is not None and not above.is_alive():  # the parent ended before this call
        os._exit(Exit.STOPPED)


def end(process: BaseProcess) -> None:
    """Send SIGTERM, then SIGTERM again (exit now), then SIGKILL."""
    for number, patience in (
        (signal.SIGTERM, AGAIN_AFTER),
        (signal.SIGTERM, KILL_AFTER),
        (signal.SIGKILL, 5.0),
    ):
        deadline = time.monotonic() + patience
        with contextlib.suppress(ProcessLookupError):
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, number)
        while process.exitcode is None and time.monotonic() < deadline:
            time.sleep(POLL)


def result(folder: Path, key: str, evaluations: list[Evaluation]) -> float:
    """Return the score of the saved weights: the loss after reloading, or another metric as evaluated."""
    if key == "eval_loss":
        return float(RunFolder(folder).read("eval.json")["tuned"]["loss"])
    if not evaluations:
        return math.nan
    saved = evaluations[-1].best_step or evaluations[-1].step
    return next((one.value for one in evaluations if one.step == saved), math.nan)


def killed_for_memory(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return how many processes of this control group the kernel killed for memory. `None` if not known.

    It reads cgroup v2 or v1, under the group's name or at the root (in a container with its own view).
    """
    if not own.exists():  # not on Linux
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
    """Return the state and reason of a run that ended by itself.

    Out of memory and a NaN or Inf loss are caused by the drawn values. They count as pruned, so that the
    sampler avoids them.

    Args:
        starved: whether the kernel killed a process for memory during the run.
    """
    text = log.read_text(encoding="utf-8", errors="replace")
    if starved and code not in [int(known) for known in Exit]:  # the run itself or one of its child processes
        return "pruned", f"the system ended the run, because CPU memory ran out ({ending(code)})"
    if code < 0:
        hint = "; the system may have run out of memory" if code == -signal.SIGKILL else ""
        return "failed", f"{ending(code)} ended the run{hint}"
    if code == Exit.STOPPED:
        return "lost", "a signal from outside the study ended the run"
    return ("pruned" if code == Exit.TRAINING else "failed"), f"exit {code}: {said(text)}"


def ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def said(text: str) -> str:
    """Return the errors at the end of a log in one line, or the last line of a traceback."""
    found = re.findall(r"^error: (.*?)(?: \[[\w-]+\])?$(?:\n +\d* +\|.*)*(?:\n  found: +(.*))?", text, re.M)
    if found:
        return "; ".join(": ".join(filter(None, parts)) for parts in found)[:500]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "the run printed no error"
