"""Kill ranks under torchrun, and train for thousands of steps. Both are parts of `reliability.py`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from finetune.checkpointing import checkpoints
from finetune.experiments.runner import verify_resume

ROOT = Path(__file__).resolve().parent.parent
FAULTS, PATHS = ROOT / "tests" / "support" / "faults.py", f"{ROOT}:{ROOT / 'tests'}"
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
STEPS = 12
WARM = 200  # steps of a run that has just begun
WORDS = (
    f"train.max_steps={STEPS}",
    "train.effective_batch_size=8",
    "train.save_steps=1",
    "train.logging_steps=1",
    "adapter.lora_dropout=0.1",
    "data.validation=null",
)


def launch(where: Path, fault: str) -> int:
    """Start two ranks on gloo, with up to three restarts, and return the exit code.

    torch's launcher shares its store with restarted processes, so that gloo finds the addresses of ended
    processes (torch 2.13). So each restart gets its own store.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    launcher += ["--monitor-interval=0.2", str(FAULTS), fault]
    given = [QUICKSTART, *WORDS, f"train.output_dir={where}", "--resume=auto", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": PATHS, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *launcher, "train", *given]
    return subprocess.run(command, env=environment, capture_output=True, check=False, cwd=ROOT).returncode


def rank_kills(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Kill a rank at a random step, and in half of the cases another rank after the restart. Compare the
    result with a launch without kills."""
    draw, straight = random.Random(seed), folder / "straight-ranks"
    if code := launch(straight, ""):
        raise SystemExit(f"the undisturbed launch ends with {code}")
    finished = equal = 0
    faults_made = list[str]()
    for number in range(count):
        made = [f"kill step={draw.randint(2, STEPS)} rank={draw.randint(0, 1)}"]
        if draw.random() < 0.5:
            made.append(f"kill step={draw.randint(2, STEPS)} rank={draw.randint(0, 1)} life=1")
        where = folder / f"ranks-{number}"
        finished += launch(where, ",".join(made)) == 0
        newest = checkpoints.published(where / "checkpoints")
        there = newest and checkpoints.step_of(newest[0]) == STEPS
        parts = verify_resume.compare(straight, where, STEPS) if there else []
        equal += bool(parts) and not any(part.differing for part in parts)
        faults_made.append(",".join(made))
        print(number, made, finished, equal, flush=True)
    return {"count": count, "finished by themselves": finished, "equal": equal, "faults": faults_made}


class Seen(NamedTuple):
    """The state of a run when a step was logged."""

    time: float
    cpu: float  # CPU seconds of its process
    step: int
    tokens: int


def endurance(folder: Path, steps: int) -> dict[str, Any]:
    """Measure whether the memory and the step time of a long run grow.

    A second run starts during its last fifth, so that other work of the machine slows both runs.
    Seconds of the clock, and of a CPU that others use too, differ by a tenth from minute to minute.
    """
    begun = [folder / "endurance", folder / "begun"]
    seen: list[list[Seen]] = [[], []]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(started(begun[0], steps))]
        while runs[0].poll() is None:
            for run, where, noted in zip(runs, begun, seen, strict=False):
                note(run, where / "metrics.jsonl", noted)
            if len(runs) == 1 and seen[0] and seen[0][-1].step >= 0.8 * steps:
                runs.append(stack.enter_context(started(begun[1], steps)))
            time.sleep(0.2)
        for run in runs[1:]:
            run.kill()
    if runs[0].returncode:
        raise subprocess.CalledProcessError(runs[0].returncode, "finetune train")
    lines = [json.loads(line) for line in (begun[0] / "metrics.jsonl").read_text().splitlines()]
    held = [line["host_memory_gib"] for line in lines if "loss" in line]
    fifth = len(held) // 5
    memory = [statistics.median(part) for part in (held[fifth : 2 * fifth], held[-fifth:])]
    since = next((one.time for one in seen[1] if one.step >= WARM), None)
    if since is None:
        raise SystemExit(f"too few steps: the second run did not reach step {WARM}")
    late, fresh = (rate([one for one in part if one.time >= since]) for part in seen)
    return {
        "steps": steps,
        "tokens per CPU second, fresh and late": [round(fresh, 1), round(late, 1)],
        "drift": round(late / fresh - 1, 4),
        "steps of the fresh run": seen[1][-1].step,
        "memory in GiB, early and late": [round(one, 4) for one in memory],
        "growth": round(memory[1] / memory[0] - 1, 4),
    }


def rate(part: list[Seen]) -> float:
    """Return tokens per CPU second."""
    return (part[-1].tokens - part[0].tokens) / (part[-1].cpu - part[0].cpu)


def started(where: Path, steps: int) -> subprocess.Popen[bytes]:
    words = [
        "train.effective_batch_size=4",
        "data.validation=null",
        "eval.forgetting=false",
        "eval.samples=0",
    ]
    words += [f"train.max_steps={steps}", "train.logging_steps=10", "train.save_steps=200"]
    command = [sys.executable, "-m", "finetune", "train", QUICKSTART, *words, f"train.output_dir={where}"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([*command, "--quiet"], cwd=ROOT, **quiet)


def note(run: subprocess.Popen[bytes], log: Path, seen: list[Seen]) -> None:
    """Return the last logged step, if it is new."""
    with contextlib.suppress(OSError, ValueError, IndexError, KeyError, psutil.Error):
        times, last = psutil.Process(run.pid).cpu_times(), json.loads(log.read_text().splitlines()[-1])
        if not seen or seen[-1].step < last["step"]:
            seen.append(Seen(time.monotonic(), times.user + times.system, last["step"], last["tokens"]))


def pages(results: dict[str, Any]) -> list[str]:
    """Return the sections of reliability.md."""
    parts = []
    if found := results.get("rank kills"):
        lines = [
            "# Ranks killed",
            "",
            "`python benchmarks/reliability.py --rank-kills 20`: two ranks on gloo",
        ]
        lines[-1] += " under `torchrun --max-restarts=3`, one"
        lines += [
            "(or one after the other) killed at a random step, against a launch that nothing befell.",
            "",
        ]
        lines += ["| launches | finished by themselves | equal bit for bit |", "|---|---|---|"]
        lines += [f"| {found['count']} | {found['finished by themselves']} | {found['equal']} |"]
        parts.append("\n".join(lines))
    if found := results.get("endurance"):
        early, late = found["tokens per CPU second, fresh and late"]
        held, last = found["memory in GiB, early and late"]
        fresh = found["steps of the fresh run"]
        lines = [
            "# A long run",
            "",
            "`python benchmarks/reliability.py --endurance 5000`, on the CPU: tokens per CPU second",
            f"of its last fifth, beside the first {fresh:,} steps of another run at the same time; the",
            "median memory of its second and of its last fifth. Drift is taken as slowing: no more",
            "than 2 % of the rate may be lost. A run that ends faster than it began (a plus) is within that;",
            "why it does was not looked into, and nothing here tells it from noise of some per cent.",
        ]
        lines += ["", "| steps | | early | late | |", "|---|---|---|---|---|"]
        shown = f"{early:,.0f} | {late:,.0f} | {found['drift']:+.1%}"
        lines += [f"| {found['steps']:,} | tokens per CPU second | {shown} |"]
        lines += [f"| | memory, GiB | {held:.3f} | {last:.3f} | {found['growth']:+.1%} |"]
        parts.append("\n".join(lines))
    return parts
