"""`finetune check RECIPE --rehearse`: run a short version of the whole training before the real one.

The rehearsal makes a first step, kills the run with SIGKILL, resumes in a new process, finishes, saves,
reloads, evaluates and generates. It compares the result bit for bit with a run that was not killed, and
prepares the upload to the Hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from finetune.checkpointing import checkpoints
from finetune.core import command_lines, formatting, progress
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, UserError
from finetune.experiments.runner import kept_runs, verify_resume
from finetune.preflight import choice_checks
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe

GIB = 2**30
EVERY = 0.2  # seconds between two measurements of a phase
OFTEN = 0.01  # seconds between two checks of a run that will be killed
LITTLE = ("eval.limit=8", "eval.samples=2", "train.save_steps=1")
LITTLE += (
    "eval.eval_steps=null",
    "eval.early_stopping_patience=null",
    "eval.metric_for_best_model=loss",
)  # the last two are valid only without eval_steps


class Phase(NamedTuple):
    name: str
    seconds: float
    host: float
    """Peak memory of the run's processes, in bytes."""
    gpu: float | None
    """Peak memory in use on the fullest GPU, in bytes, from nvidia-smi. `None` without nvidia-smi."""


def run(recipe: Recipe, command: list[str], screen: Console) -> None:
    """Run the rehearsal and print the time and memory of each phase.

    Args:
        command: recipe and overrides, as for `finetune train`.

    Raises:
        UserError: a phase fails, with its own message and exit code. Or the resumed run differs from the run
            that was not killed (exit 4).
    """
    verify_resume.outside_a_launch([*command, "--rehearse"])
    choice_checks.pinned(recipe)
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="finetune-preflight-"))
    lived, straight = folder / "run", folder / "straight"
    steps = (
        12 if adapter_types.find(recipe.adapter.type).peft == "adalora" else 3
    )  # the minimum that AdaLoRA needs to prune
    own = [
        text for text in verify_resume.shortened(recipe) if "save_total_limit" not in text
    ]  # keep the recipe's own limit
    # Both phases of AdaLoRA fit into 12 steps
    own += [f"adapter.{key}=4" for key in ("tinit", "tfinal") if key in recipe.adapter.options()]
    short = [*own, *LITTLE, f"train.max_steps={steps}", "train.num_train_epochs=null"]
    train, half = ["train", *command, *short, "--quiet"], steps // 2
    until = [kept_runs.in_folder(straight), f"--until={steps}"]
    ends = (Exit.STOPPED, Exit.DONE)
    resumed = kept_runs.share_of_steps(lived, steps, None)
    try:
        with progress.phase(screen, "rehearsal", parts=4):
            with kept_runs.part("until the run is killed", lived, half):
                phases = _live([*train, kept_runs.in_folder(lived)], lived, kill_after=half)
            newest, *older = checkpoints.published(lived / "checkpoints")
            if checkpoints.step_of(newest) == steps and older:  # leave at least one step for the new process
                shutil.rmtree(newest)
            screen.say(f"killed the run after step {half}; resuming it in a new process ...")
            with progress.part("resumed run", lambda: (steps * resumed() - half) / (steps - half)):
                phases += _live([*train, kept_runs.in_folder(lived), "--resume"], lived, said="resume: ")
            screen.say("training the same steps without a stop, for comparison ...")
            with kept_runs.part("without a stop", straight, steps):
                phases += _live([*train, *until], straight, expected=ends, said="without a stop: ")
            parts = verify_resume.compare(straight, lived, steps)
            with progress.part("publishing"):
                phases += _live(["publish", str(lived), "--dry-run", "--quiet"], lived)
        size = checkpoints.size_of(lived / "checkpoints" / f"step-{steps}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    columns = ("phase", "seconds", "CPU GiB", "GPU GiB")
    screen.table(f"rehearsal of {command[0]}, {steps} steps", columns, [_row(phase) for phase in phases])
    fix = command_lines.command("check", *command, "--verify-resume")
    verify_resume.refuse(parts, "a killed and resumed run differs from a run without a stop", fix)
    kept = recipe.train.save_total_limit
    screen.say(
        f"the resumed run equals the run without a stop, bit for bit, in {len(parts)} parts",
        f"a checkpoint has {formatting.size(size)}; finetune keeps {kept if kept else 'all checkpoints'}",
        f"all phases work: train, kill, resume, evaluate, publish ({time.monotonic() - started:.0f} s)",
    )


def _live(
    words: list[str],
    folder: Path,
    *,
    expected: tuple[int, ...] = (Exit.DONE,),
    said: str = "",
    kill_after: int = 0,
) -> list[Phase]:
    """Run one command in a separate process, and measure its phases from the files that it creates.

    Args:
        kill_after: kill the process after the checkpoint of this step. 0 lets it finish.

    Raises:
        UserError: the exit code is not in `expected`, or the process ended before it was killed.
    """
    before = {path.name for path in folder.iterdir()} if folder.exists() else set[str]()
    marks = {"recipe.resolved.yaml": "load", "adapter": "steps", "model": "steps"}
    marks = {name: phase for name, phase in marks.items() if name not in before}
    first = "publish --dry-run" if words[0] == "publish" else next(iter(marks.values()), "steps")
    # The dry run keeps a staging folder; remove it with the other files
    staged = {"TMPDIR": str(folder.parent)}
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "finetune", *words],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **(staged if words[0] == "publish" else {})},
        )
        if kill_after:
            threading.Thread(target=_kill_after, args=(kill_after, folder, process), daemon=True).start()
            expected = (-signal.SIGKILL,)
        phases: list[Phase] = []
        name, since, host, gpu = first, time.monotonic(), 0.0, _gpu()
        while process.poll() is None:
            now = _now(name, marks, folder)
            if now != name:
                phases.append(Phase(said + name, time.monotonic() - since, host, gpu))
                name, since, host, gpu = now, time.monotonic(), 0.0, _gpu()
            host, used = max(host, _held(process.pid)), _gpu()
            gpu = max(gpu or 0.0, used) if used is not None else None
            time.sleep(EVERY)
        phases.append(Phase(said + name, time.monotonic() - since, host, gpu))
        errors.seek(0)
        text = errors.read().strip()
    if kill_after and process.returncode == Exit.DONE:
        raise UserError(
            Problem(
                "the run ended before finetune killed it, so the rehearsal did not test a resume",
                fix="finetune check RECIPE --verify-resume",
                code="run-check",
            ),
            code=Exit.ENVIRONMENT,
        )
    if process.returncode not in expected:
        raise verify_resume.failed(
            f"the rehearsal failed in the phase `{phases[-1].name}`", words, process.returncode, text
        )
    return phases


def _kill_after(step: int, folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill a run and its child processes with SIGKILL after it has logged and saved a step."""
    while process.poll() is None:
        saved = map(checkpoints.step_of, checkpoints.published(folder / "checkpoints"))
        if _logged(folder) >= step and any(one >= step for one in saved):
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(process.pid)
                for one in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            return
        time.sleep(OFTEN)


def _logged(folder: Path) -> int:
    """Return the last step in metrics.jsonl."""
    try:
        whole = (folder / "metrics.jsonl").read_text(encoding="utf-8").rpartition("\n")[0]
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in whole.splitlines()), default=0)


def _now(name: str, marks: dict[str, str], folder: Path) -> str:
    """Return the current phase from the files in the folder."""
    there = [mark for mark in marks if (folder / mark).exists()]
    if any(mark in ("adapter", "model") for mark in there):
        return "save, reopen, evaluate, generate"
    return "steps" if "recipe.resolved.yaml" in there else name


def _held(process: int) -> float:
    """Return the memory of a process and its child processes, in bytes."""
    try:
        top = psutil.Process(process)
        return float(sum(p.memory_info().rss for p in (top, *top.children(recursive=True))))
    except psutil.NoSuchProcess:
        return 0.0


def _gpu() -> float | None:
    """Return the memory in use on the fullest GPU, in bytes."""
    if not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return max((float(number) for number in said if number.isdecimal()), default=0.0) * 2**20


def _row(phase: Phase) -> tuple[str, ...]:
    gpu = "-" if phase.gpu is None else formatting.amount(phase.gpu / GIB)
    return phase.name, formatting.amount(phase.seconds), formatting.amount(phase.host / GIB), gpu
