"""`finetune sweep` with trials that fail, a parent that is killed, and two workers on one PostgreSQL.

    python benchmarks/tuning.py                  # all three, into tuning.json
    python benchmarks/tuning.py --only failures

Every trial is a real run of the embedded model. A fifth of them is ended by kill -9 while it trains, and the
space holds a value whose loss is not finite.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import postgres
import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "tuning.json"
TRIALS = 50
KILLED = range(4, TRIALS, 5)  # trials that get a kill -9
SPACE = """
search: {startup_trials: 6, evaluations: 3}
space:
  train.learning_rate: {low: 0.1, high: 10, log: true, times: train.learning_rate}
  train.optim: {choices: [adamw_torch_fused, lion_32bit, adamw_8bit]}
  train.weight_decay: {choices: [0.0, 0.01, 1.0e+38]} # the last one is no weight decay: it overflows
  adapter.r: {low: 4, high: 32, log: true}
  adapter.lora_alpha: {choices: [1, 2], times: adapter.r}
"""
SHORT = [
    "train.max_steps=12",
    "train.warmup_steps=1",
    "train.effective_batch_size=4",
    "train.logging_steps=1",
]


def begin(folder: Path, *more: str, name: str = "study", space: str = SPACE, url: str = "") -> Any:
    """A `finetune sweep` on the embedded model, with few rows; what it says goes to <name>.txt."""
    for split, rows in (("train", 96), ("test", 24)):
        lines = (ROOT / f"examples/tiny_llama/data/{split}.jsonl").read_text().splitlines()[:rows]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "space.yaml").write_text(space)
    words = ["sweep", "recipes/quickstart.yaml", *SHORT, "--space", str(folder / "space.yaml")]
    words += [f"data.name={folder}/train.jsonl", f"data.validation={folder}/test.jsonl"]
    words += [*more, "--output", str(folder / "study")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **path()}
    environment |= {"FINETUNE_STORAGE": url} if url else {}
    log = (folder / f"{name}.txt").open("wb")
    command = [sys.executable, "-m", "finetune", *words]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def path() -> dict[str, str]:
    """This checkout before what is installed."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "study" / "trials.json").read_text())


def training(folder: Path, number: int) -> int | None:
    """The process of a trial that has logged a step, from its lock; `None`: there is none yet."""
    run = folder / "study" / f"trial-{number:04d}"
    if not (run / "metrics.jsonl").exists():
        return None
    try:
        match = re.match(r"process (\d+) ", (run / ".lock").read_text())
    except FileNotFoundError:
        return None
    return int(match[1]) if match else None


def held(process: psutil.Process) -> float:
    """MiB of a process and what it waits with (not the trials): what would grow if trials left something."""
    return process.memory_info().rss / 2**20


def failures(folder: Path) -> dict[str, Any]:
    """50 trials; a fifth is killed, and what draws the bad value fails by itself."""
    process, killed, memory = begin(folder, "--trials", str(TRIALS)), set(), {}
    parent, began = psutil.Process(process.pid), time.monotonic()
    while process.poll() is None:
        for number in set(KILLED) - killed:
            target = training(folder, number)
            if target is not None:
                os.kill(target, signal.SIGKILL)
                killed.add(number)
        newest = len(list((folder / "study").glob("trial-*")))
        if newest not in memory and process.poll() is None:
            memory[newest] = held(parent)
        time.sleep(0.05)
    content = found(folder)
    injected = [row for row in content["trials"] if row["number"] in killed]
    starts = [row["started_seconds"] for row in content["trials"] if row["started_seconds"]]
    return {
        "exit code": process.returncode,
        "trials": len(content["trials"]),
        "counts": {state: count for state, count in content["counts"].items() if count},
        "killed": len(killed),
        "reasons of the killed": sorted({row["reason"] for row in injected}),
        "not finite": sum("finite" in row["reason"] or "NaN" in row["reason"] for row in content["trials"]),
        "best": min(row["value"] for row in content["trials"] if row["value"] is not None),
        "own": next((r["value"] for r in content["trials"] if r["number"] == content["own"]), None),
        "first start, seconds": starts[0],
        "second start, seconds": starts[1],
        "median start, seconds": sorted(starts)[len(starts) // 2],
        "seconds": time.monotonic() - began,
        "parent at trial 3, MiB": memory.get(3),
        "parent at the last, MiB": memory[max(memory)],
        "importances": content["importances"],
    }


def resumed(folder: Path) -> dict[str, Any]:
    """6 trials; the parent is killed while the third one trains, and the command is given again."""
    process = begin(folder, "--trials", "6", name="first")
    while (child := training(folder, 2)) is None:
        time.sleep(0.05)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the trial outlived its study"
        time.sleep(0.05)
    again = begin(folder, "--trials", "6", name="second")
    code = again.wait()
    content = found(folder)
    rows = content["trials"]
    lost = [row for row in rows if row["state"] == "lost"]
    anew = [row for row in rows if row["values"] == lost[0]["values"] and row is not lost[0]] if lost else []
    return {
        "exit code": code,
        "lost": [row["number"] for row in lost],
        "run again as": [row["number"] for row in anew],
        "trials counted": sum(row["state"] in ("complete", "pruned", "failed") for row in rows),
        "counts": {state: count for state, count in content["counts"].items() if count},
    }


def workers(folder: Path) -> dict[str, Any]:
    """8 trials by two workers on one study in a PostgreSQL server made for it."""
    lacking = postgres.missing()
    if lacking:
        return {"skipped": lacking}
    with postgres.serve() as (url, password):
        began = time.monotonic()
        pair = [begin(folder, "--trials", "8", name=f"worker{n}", url=url) for n in (1, 2)]
        codes = [process.wait() for process in pair]
        seconds = time.monotonic() - began
        texts = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    content = found(folder)
    shares: dict[str, int] = {}
    for row in content["trials"]:
        shares[row["worker"]] = shares.get(row["worker"], 0) + 1
    return {
        "exit codes": codes,
        "trials": len(content["trials"]),
        "counts": {state: count for state, count in content["counts"].items() if count},
        "trials of each worker": sorted(shares.values()),
        "files with the password": sum(password in text for text in texts),
        "seconds": seconds,
    }


def table(results: dict[str, Any]) -> str:
    """What stands in docs/guides/sweep.md."""
    lines = ["| what was done | what came of it |", "|---|---|"]
    one, two, three = (results.get(name) for name in ("failures", "resumed", "workers"))
    if one:
        grew = one["parent at the last, MiB"] / one["parent at trial 3, MiB"] - 1
        states = ", ".join(f"{count} {state}" for state, count in one["counts"].items())
        starts = [f"{one[f'{which} start, seconds']:.1f} s" for which in ("first", "second", "median")]
        how_many, last = f"{one['trials']} trials, {one['killed']} of them", one["trials"]
        starts = f"{starts[0]} the first, {starts[1]} the second, {starts[2]} in the median"
        lines += [
            f"| {how_many} ended by kill -9 | exit {one['exit code']}: {states} |",
            f"| a value whose loss is NaN or Inf | {one['not finite']} trials pruned with that reason |",
            f"| best against the recipe's own | {one['best']:.3f} against {one['own']:.3f} |",
            f"| from spawning a trial to its first step | {starts} |",
            f"| memory of the study's process, trial 3 to {last} | {one['parent at trial 3, MiB']:.0f} MiB,"
            f" {grew:+.1%} |",
        ]
    if two:
        states = ", ".join(f"{count} {state}" for state, count in two["counts"].items())
        lines.append(
            f"| kill -9 of the study in trial 2, the same command again | exit {two['exit code']}:"
            f" {states}; run again as trial {', '.join(map(str, two['run again as']))} |"
        )
    if three:
        split = " + ".join(map(str, three["trials of each worker"]))
        lines += [
            f"| two workers, one PostgreSQL, `--trials 8` | exits {three['exit codes']}: {split} trials |",
            f"| files that hold the storage's password | {three['files with the password']} |",
        ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["failures", "resumed", "workers"])
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, scenario in (("failures", failures), ("resumed", resumed), ("workers", workers)):
        if given.only in (None, name):
            folder = Path(tempfile.mkdtemp(prefix="finetune-tune-"))
            try:
                made = scenario(folder)
                print(json.dumps({name: made}, indent=1), flush=True)
                results |= {name: made} if "skipped" not in made else {}  # or as it was
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
