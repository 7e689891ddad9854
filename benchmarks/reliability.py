"""Runs that are killed and told to stop at random times, again and again, against the run that never was;
recipes that are changed at random; bugs that are put back; artefacts that attack.

    python benchmarks/reliability.py --kills 100 --signals 50      # writes reliability.json and the tables
    python benchmarks/reliability.py --rank-kills 20 --endurance 5000      # benchmarks/long_runs.py
    python benchmarks/reliability.py --fuzz 10000                  # benchmarks/fuzz.py
    python benchmarks/reliability.py --seeded                      # benchmarks/seeded_bugs.py
    python benchmarks/reliability.py --attacks                     # tests/test_advisories.py and its kin

What is not asked for stays in the results as it was.

Each process is forked from one that has imported the libraries, so that a run begins in a second; it is
killed by a real kill -9 (or told to stop by a real SIGTERM) at a random time. What the last of them leaves is
compared with a run that went straight through, part by part (`finetune.prove`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import fuzz
import long_runs
import seeded_bugs

from finetune import checkpoint, cli, prove
from finetune import train as _imported  # noqa: F401 (once, before any fork)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "reliability.json"
TABLE = ROOT / "benchmarks" / "reliability.md"
STEPS = 2000  # more than a storm gets through: a run that is finished can't be killed
WORDS = [
    str(ROOT / "recipes" / "quickstart.yaml"),
    f"train.max_steps={STEPS}",
    "train.effective_batch_size=4",
    "train.save_steps=3",
    "adapter.lora_dropout=0.1",
    "data.validation=null",
    "adapter.r=4",
]


def start(words: list[str]) -> int:
    """A `finetune train` in a process of its own; its id."""
    child = os.fork()
    if not child:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os._exit(cli.main(["train", *words, "--quiet"]))
    return child


def end(child: int, after: float, number: int) -> int:
    """Its exit code (negative: the signal that ended it), when it was sent `number` after so many seconds."""
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.002)
    os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def storm(folder: Path, kind: str, count: int, seed: int) -> dict[str, Any]:
    """`count` times: go on, be ended at a random time, verify what is there; then compare the end."""
    number = signal.SIGKILL if kind == "kill -9" else signal.SIGTERM
    draw, where = random.Random(seed), folder / kind.replace(" ", "")
    pruning = ["adapter.type=adalora", "adapter.tinit=2", "adapter.tfinal=10"]
    words = [*WORDS, *(pruning if kind == "kill -9" else []), f"train.output_dir={where}"]
    ended: dict[str, int] = {}
    unverified = resumed = 0
    began, child = time.monotonic(), start([*words, "--resume=auto"])
    while not checkpoint.published(where / "checkpoints"):
        time.sleep(0.01)
    usual = time.monotonic() - began  # until the first checkpoint
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(count):
        before = len(checkpoint.published(where / "checkpoints"))
        code = end(start([*words, "--resume=auto"]), draw.uniform(0.1, 2.0) * usual, number)
        ended[str(code)] = ended.get(str(code), 0) + 1
        published = checkpoint.published(where / "checkpoints")
        resumed += before > 0 and len(published) > 0
        for path in published:
            try:
                checkpoint.verify(path)
            except checkpoint.Damaged:
                unverified += 1
    newest = checkpoint.published(where / "checkpoints")
    step = min(STEPS, (checkpoint.step_of(newest[0]) if newest else 0) + 2)
    last = [*words, "--resume=auto", f"--until={step}"]
    codes = [os.waitstatus_to_exitcode(os.waitpid(start(last), 0)[1])]
    straight = folder / f"straight-{where.name}"
    words[-1] = f"train.output_dir={straight}"
    codes.append(os.waitstatus_to_exitcode(os.waitpid(start([*words, f"--until={step}"]), 0)[1]))
    parts = prove.compare(straight, where, step)
    differing = [part.name for part in parts if part.differing]
    return {
        "ended": ended,
        "count": count,
        "steps": step,
        "resumed": resumed,
        "exit codes of the end": codes,
        "published that do not verify": unverified,
        "tensors compared": sum(part.tensors for part in parts),
        "parts that differ": differing,
    }


ATTACKS = {  # test file -> what is counted
    "tests/test_advisories.py": "attacks by real artefacts, named after their advisories",
    "tests/test_untrusted.py": "indices, links and adapters that reach out of their folder or lack a part",
    "tests/test_secrets.py": "canaries and what masks them, through a run's whole life",
    "tests/test_bad_inputs.py": "bad inputs: code, place, words, time (52 rows of the table)",
}


def attacks() -> dict[str, Any]:
    """Tests passed and failed of each file."""
    found = {}
    for file in ATTACKS:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--color=no",
            "-o",
            "addopts=",
        ]
        done = subprocess.run([*command, file], cwd=ROOT, capture_output=True, text=True, check=False)
        last = done.stdout.strip().splitlines()[-1]
        counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
        found[file] = {"passed": 0, "failed": 0, **counts}
        print(file, found[file], flush=True)
    return found


def page(results: dict[str, Any]) -> str:
    """reliability.md, of all that there are results for."""
    head = "# Killed and stopped\n\nMade by `benchmarks/reliability.py` (`make soak`): runs ended at random "
    head += "times, resumed each time,\nagainst the run that went straight through.\n\n"
    storms = {kind: found for kind, found in results.items() if kind in ("kill -9", "SIGTERM")}
    parts = [head + table(storms)]
    parts += long_runs.pages(results)
    if found := results.get("fuzz"):
        lines = [f"| {name} | {count} |" for name, count in found.items() if name != "wrong"]
        lost = f"another exception, a problem without a place, or slower than {fuzz.SLOWEST:g} s"
        lines.append(f"| {lost} | {len(found['wrong'])} |")
        title = (
            "# Fuzzed recipes\n\n`python benchmarks/reliability.py --fuzz 10000`: shipped recipes with keys "
        )
        title += "dropped, renamed, retyped, doubled,\nmoved and nested, text spoilt, overrides drawn.\n"
        parts.append("\n".join([title, "| | |", "|---|---|", *lines]))
    if found := results.get("seeded"):
        caught = sum(one["caught"] for one in found["found"].values())
        title = (
            "# Seeded bugs\n\n`python benchmarks/reliability.py --seeded`: each put back into a copy of the "
        )
        title += f"source; **{caught} of {len(found['found'])} caught**\nby the test named for it; those "
        title += f"{'pass' if found['all pass without a bug'] else 'DO NOT PASS'} without the bug.\n"
        lines = [
            f"| {name} | {'yes' if one['caught'] else 'NO'} | {one['by'].removeprefix('tests/')} |"
            for name, one in found["found"].items()
        ]
        parts.append("\n".join([title, "| bug | caught | by |", "|---|---|---|", *lines]))
    if found := results.get("attacks"):
        title = "# Attacks and bad inputs\n\n`python benchmarks/reliability.py --attacks`\n"
        lines = [
            f"| {ATTACKS[file]} | {one['passed']} | {one['failed']} | {file} |" for file, one in found.items()
        ]
        parts.append("\n".join([title, "| tests of | passed | failed | |", "|---|---|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def table(results: dict[str, Any]) -> str:
    lines = [
        "| | times | while it ran | steps | published and damaged | tensors compared | parts that differ |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind, found in results.items():
        numbers = (
            found["count"],
            sum(count for code, count in found["ended"].items() if code != "0"),
            found["steps"],
            found["published that do not verify"],
            found["tensors compared"],
        )
        lines.append(
            f"| {kind} | " + " | ".join(map(str, numbers)) + f" | {len(found['parts that differ'])} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--signals", type=int, default=0)
    parser.add_argument("--rank-kills", type=int, default=0, help="under torchrun --max-restarts, on gloo")
    parser.add_argument("--endurance", type=int, default=0, metavar="STEPS")
    parser.add_argument("--fuzz", type=int, default=0, help="fuzzed recipes")
    parser.add_argument("--seeded", nargs="*", metavar="WORD", help="bugs put back; by words of their names")
    parser.add_argument("--attacks", action="store_true", help="tests of advisories, secrets and bad inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="do not write the results")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="finetune-soak-"))
    try:
        asked = {"kill -9": given.kills, "SIGTERM": given.signals}
        results = {kind: storm(folder, kind, n, given.seed) for kind, n in asked.items() if n}
        bad = [k for k, r in results.items() if r["parts that differ"] or r["published that do not verify"]]
        if given.rank_kills:
            results["rank kills"] = long_runs.rank_kills(folder, given.rank_kills, given.seed)
            bad += ["rank kills"] if results["rank kills"]["equal"] < given.rank_kills else []
        if given.endurance:
            results["endurance"] = found = long_runs.endurance(folder, given.endurance)
            bad += ["endurance"] if found["drift"] < -0.02 or found["growth"] > 0.02 else []
        if given.fuzz:
            results["fuzz"] = fuzz.summary(fuzz.run(range(given.fuzz), folder))
            bad += list(results["fuzz"]["wrong"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if given.seeded is not None:
        results["seeded"] = seeded_bugs.run(given.seeded)
        bad += ["seeded"] if not results["seeded"]["all pass without a bug"] else []
        bad += [name for name, one in results["seeded"]["found"].items() if not one["caught"]]
    if given.attacks:
        results["attacks"] = attacks()
        bad += [file for file, one in results["attacks"].items() if one["failed"]]
    print(json.dumps(results, indent=1))
    if not given.keep:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
        if "seeded" in results:  # perhaps some of them
            found = {**before.get("seeded", {}).get("found", {}), **results["seeded"]["found"]}
            known = {bug.name: found[bug.name] for bug in seeded_bugs.BUGS if bug.name in found}
            results["seeded"]["found"] = known
        results = {**before, **results}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        TABLE.write_text(page(results), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
