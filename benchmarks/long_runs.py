"""Ranks that are killed under torchrun, and a run of thousands of steps; parts of `reliability.py`."""

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
from typing import Any

import psutil

from finetune import checkpoint, faults, prove

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
STEPS = 12
WORDS = (
    f"train.max_steps={STEPS}",
    "train.effective_batch_size=8",
    "train.save_steps=1",
    "train.logging_steps=1",
    "adapter.lora_dropout=0.1",
    "data.validation=null",
)


def launch(where: Path, fault: str) -> int:
    """Two ranks on gloo, begun again up to three times; the exit code.

    Torch's launcher shares its store with the processes it begins again, where gloo then finds addresses of
    those that are gone (torch 2.13): each life gets a store of its own.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3"]
    launcher += ["--monitor-interval=0.2", "-m", "finetune"]
    given = [QUICKSTART, *WORDS, f"train.output_dir={where}", "--resume=auto", "--quiet"]
    environment = {**os.environ, faults.VARIABLE: fault, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, *launcher, "train", *given]
    return subprocess.run(command, env=environment, capture_output=True, check=False, cwd=ROOT).returncode


def rank_kills(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """A rank killed at a random step, half of the time another one after the restart; then what is left is
    held against a launch that nothing befell."""
    draw, straight = random.Random(seed), folder / "straight-ranks"
    if code := launch(straight, ""):
        raise SystemExit(f"the undisturbed launch ends with {code}")
    finished = equal = 0
    faults_made = list[str]()
    for number in range(count):
        made = [f"step:{draw.randint(2, STEPS)}:rank:{draw.randint(0, 1)}:kill"]
        if draw.random() < 0.5:
            made.append(f"step:{draw.randint(2, STEPS)}:rank:{draw.randint(0, 1)}:life:1:kill")
        where = folder / f"ranks-{number}"
        finished += launch(where, ",".join(made)) == 0
        newest = checkpoint.published(where / "checkpoints")
        there = newest and checkpoint.step_of(newest[0]) == STEPS
        parts = prove.compare(straight, where, STEPS) if there else []
        equal += bool(parts) and not any(part.differing for part in parts)
        faults_made.append(",".join(made))
        print(number, made, finished, equal, flush=True)
    return {"count": count, "finished by themselves": finished, "equal": equal, "faults": faults_made}


def endurance(folder: Path, steps: int) -> dict[str, Any]:
    """One run of so many steps: whether it takes more memory, or longer, as it goes on."""
    where = folder / "endurance"
    words = ["train.effective_batch_size=4", "data.validation=null", "eval.general=false", "eval.samples=0"]
    words += [f"train.max_steps={steps}", "train.logging_steps=10", "train.save_steps=200"]
    command = [sys.executable, "-m", "finetune", "train", QUICKSTART, *words, f"train.output_dir={where}"]
    spent = watched([*command, "--quiet"], where / "metrics.jsonl")
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    fifth = len(lines) // 5
    early, late = lines[fifth : 2 * fifth], lines[-fifth:]  # the first fifth warms caches

    def median(part: list[dict[str, Any]], key: str) -> float:
        return statistics.median(line[key] for line in part)

    def rate(part: list[dict[str, Any]]) -> float:
        """Tokens a CPU second: other work on the machine does not change it."""
        seen = [line for line in part if line["step"] in spent]
        seconds = spent[seen[-1]["step"]] - spent[seen[0]["step"]]
        return (seen[-1]["tokens"] - seen[0]["tokens"]) / seconds

    rates = [rate(part) for part in (early, late)]
    clock = [median(part, "tokens_per_second") for part in (early, late)]
    memory = [median(part, "host_memory_gib") for part in (early, late)]
    return {
        "steps": steps,
        "tokens per CPU second, early and late": [round(rate, 1) for rate in rates],
        "drift": round(rates[1] / rates[0] - 1, 4),
        "tokens per second, early and late": [round(rate, 1) for rate in clock],
        "memory in GiB, early and late": [round(held, 4) for held in memory],
        "growth": round(memory[1] / memory[0] - 1, 4),
    }


def watched(command: list[str], log: Path) -> dict[int, float]:
    """Run it; by the step that was logged last, the CPU seconds that it had taken by then."""
    spent = dict[int, float]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        process = psutil.Process(run.pid)
        while run.poll() is None:
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError, psutil.Error):
                times, last = process.cpu_times(), json.loads(log.read_text().splitlines()[-1])
                spent.setdefault(last["step"], times.user + times.system)
            time.sleep(0.2)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, command)
    return spent


def pages(results: dict[str, Any]) -> list[str]:
    """What reliability.md says of them."""
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
        early, late = found["tokens per CPU second, early and late"]
        fast, slow = found["tokens per second, early and late"]
        held, last = found["memory in GiB, early and late"]
        lines = ["# A long run", "", "`python benchmarks/reliability.py --endurance 5000`: medians of the"]
        lines[-1] += " second and the last fifth of its steps, on the CPU."
        lines += ["", "| steps | | early | late | |", "|---|---|---|---|---|"]
        shown = f"{early:,.0f} | {late:,.0f} | {found['drift']:+.1%}"
        lines += [f"| {found['steps']:,} | tokens a CPU second | {shown} |"]
        lines += [f"| | tokens/s by the clock | {fast:,.0f} | {slow:,.0f} | {slow / fast - 1:+.1%} |"]
        lines += [f"| | memory, GiB | {held:.3f} | {last:.3f} | {found['growth']:+.1%} |"]
        parts.append("\n".join(lines))
    return parts
