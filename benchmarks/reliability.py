"""Test reliability: kill and stop runs at random times, and compare the result with an uninterrupted run.

    python benchmarks/reliability.py --kills 100 --signals 50      # writes reliability.json and the tables
    python benchmarks/reliability.py --variants 10                 # evaluation, loader workers, two ranks
    python benchmarks/reliability.py --resume-matrix               # benchmarks/resume_matrix.py
    python benchmarks/reliability.py --rank-kills 20 --endurance 5000      # benchmarks/long_runs.py
    python benchmarks/reliability.py --fuzz 10000                  # random recipes: benchmarks/fuzz.py
    python benchmarks/reliability.py --seeded                      # known bugs: benchmarks/seeded_bugs.py
    python benchmarks/reliability.py --saves                       # crashes while saving, damaged checkpoints
    python benchmarks/reliability.py --attacks                     # tests/security and the bad inputs

An option updates its own part of the results. The other parts stay.

Each run is forked from a process that has imported the libraries, so it starts in a second. At a random time,
a `kill -9` kills it, or SIGTERM stops it, and it is resumed. `finetune/experiments/runner/verify_resume.py`
compares the final run folder with the folder of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import fuzz
import long_runs
import resume_matrix
import seeded_bugs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from finetune.checkpointing import checkpoints
from finetune.cli import main as cli_main
from finetune.distributed import launch_environment
from finetune.experiments.runner import verify_resume
from finetune.launch import launcher
from finetune.training import pipeline as _imported  # noqa: F401 (imported once, before any fork)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "reliability.json"
TABLE = ROOT / "benchmarks" / "reliability.md"
STEPS = 2000  # so many that no run finishes, because a finished run can't be killed
WORDS = [
    str(ROOT / "recipes" / "quickstart.yaml"),
    f"train.max_steps={STEPS}",
    "train.effective_batch_size=4",
    "train.save_steps=3",
    "adapter.lora_dropout=0.1",
    "data.validation=null",
    "adapter.r=4",
]


class Storm(NamedTuple):
    number: int
    """The signal."""
    words: tuple[str, ...] = ()
    ranks: int = 1
    group: bool = False
    """Whether the workers of the data loader get the signal too."""


STORMS = {
    "kill -9": Storm(signal.SIGKILL, ("adapter.type=adalora", "adapter.tinit=2", "adapter.tfinal=10")),
    "SIGTERM": Storm(signal.SIGTERM),
    "SIGTERM while it evaluates": Storm(signal.SIGTERM, ("eval.eval_steps=1", "eval.generate=false")),
    "SIGTERM with loader workers": Storm(signal.SIGTERM, ("train.dataloader_num_workers=2",), group=True),
    "SIGTERM to one of two ranks, or both": Storm(signal.SIGTERM, ranks=2),
}


def start(words: list[str], **environment: str) -> int:
    """Start `finetune train` in a process that leads its own group, and return the process id."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.environ.update(environment)
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os._exit(cli_main.main(["train", *words, "--quiet"]))
    return child


def launch_of(words: list[str], ranks: int, folder: Path) -> list[int]:
    """Start the processes of one launch with the environment of `accelerate launch`. Return their ids."""
    if ranks == 1:
        return [start(words)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    given |= {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        launch_environment.TIMEOUT: "60",
    }
    given |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(ranks):
        (error := folder / f"error-{rank}").unlink(missing_ok=True)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error)}
        children.append(start(words, **given, **own))
    return children


def wait(children: list[int], folder: Path, seconds: float | None = None) -> int | None:
    """Wait for a launch. The first process that ends stops the others, as with a launcher.

    Returns:
        The exit code, or `None` if no process ended within `seconds`.
    """
    until, codes = time.monotonic() + (seconds or float("inf")), dict[int, int]()
    while len(codes) < len(children) and (codes or time.monotonic() < until):
        for rank, child in enumerate(children):
            if rank not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[rank] = os.waitstatus_to_exitcode(found[1])
                for other in set(range(len(children))) - codes.keys():
                    os.kill(children[other], signal.SIGTERM)
        time.sleep(0.002)
    if len(children) == 1 or not codes:
        return codes.get(0)
    failures = {
        rank: ProcessFailure(rank, children[rank], code, str(folder / f"error-{rank}"))
        for rank, code in codes.items()
        if code
    }
    return launcher.first(failures)[1].exitcode if failures else 0


def send(children: list[int], storm: Storm, draw: random.Random) -> None:
    """Send the signal to the process or its group. With two ranks, send it to one or to both."""
    chosen = draw.sample(children, draw.randint(1, len(children)))
    for child in chosen:
        (os.killpg if storm.group else os.kill)(child, storm.number)


def run_storm(folder: Path, kind: str, count: int, seed: int) -> dict[str, Any]:
    """Resume, stop at a random time and verify the folder `count` times. Then compare the final state."""
    storm, draw = STORMS[kind], random.Random(seed)
    where = folder / re.sub(r"\W", "", kind)
    words = [*WORDS, *storm.words, f"train.output_dir={where}"]
    if "eval.eval_steps=1" in storm.words:
        words.append(f"data.validation={held_out(folder)}")
    ended: dict[str, int] = {}
    unverified = resumed = 0
    began, children = time.monotonic(), launch_of([*words, "--resume=auto"], storm.ranks, folder)
    while not checkpoints.published(where / "checkpoints"):
        time.sleep(0.01)
    usual = time.monotonic() - began  # seconds until the first checkpoint
    for child in children:
        os.killpg(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    for _ in range(count):
        before = len(checkpoints.published(where / "checkpoints"))
        children = launch_of([*words, "--resume=auto"], storm.ranks, folder)
        code = wait(children, folder, draw.uniform(0.1, 2.0) * usual)
        if code is None:
            send(children, storm, draw)
            code = wait(children, folder)
        ended[str(code)] = ended.get(str(code), 0) + 1
        published = checkpoints.published(where / "checkpoints")
        resumed += before > 0 and len(published) > 0
        for path in published:
            try:
                checkpoints.verify(path)
            except checkpoints.Damaged:
                unverified += 1
    newest = checkpoints.published(where / "checkpoints")
    step = min(STEPS, (checkpoints.step_of(newest[0]) if newest else 0) + 2)
    straight = folder / f"straight-{where.name}"
    until = f"--until={step}"
    ends = [*words, "--resume=auto", until], [*words, f"train.output_dir={straight}", until]
    codes = [wait(launch_of(one, storm.ranks, folder), folder) for one in ends]
    parts = verify_resume.compare(straight, where, step)
    return {
        "ended": ended,
        "count": count,
        "steps": step,
        "resumed": resumed,
        "exit codes of the end": codes,
        "published that do not verify": unverified,
        "tensors compared": sum(part.tensors for part in parts),
        "parts that differ": [part.name for part in parts if part.differing],
    }


def held_out(folder: Path) -> Path:
    """Write a few examples for an evaluation after every step."""
    lines = (
        (ROOT / "examples" / "tiny_llama" / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    )
    (folder / "validation.jsonl").write_text("\n".join(lines[:12]) + "\n", encoding="utf-8")
    return folder / "validation.jsonl"


ATTACKS = {  # test file -> the name of its cases
    "tests/security/test_advisories.py": "attacks by real artifacts, named after their advisories",
    "tests/security/test_untrusted_files.py": (
        "indices, links and adapters that reach out of their folder or lack a part"
    ),
    "tests/security/test_secrets.py": "canaries and what masks them, through a run's whole life",
    "tests/integration/test_bad_inputs.py": "bad inputs: code, place, words, time (52 rows of the table)",
}


SAVES = (
    "tests/unit/checkpointing/test_checkpoints.py::test_wherever_a_save_is_cut_off_one_verifies",
    "tests/integration/test_resume.py::test_damage_is_seen_and_passed_over",
)


CASES = {
    "first": "a first save",
    "next": "a save that lets an older one go",
    "again": "a save in place of a damaged one",
}


def pytest(*given: str) -> str:
    """Return pytest's summary of some tests."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", "-o", "addopts=", *given]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def saves() -> dict[str, Any]:
    """Return the number of crash points and damaged files in the tests of saves, and whether all passed."""
    said = pytest("-s", *SAVES)
    points = {case: int(n) for case, n in re.findall(r"crash points of the (\w+) save: (\d+)", said)}
    damages = re.search(r"damages: (\d+) files x (\d+)", said)
    passed = " failed" not in said and " error" not in said
    return {
        "crash points": points,
        "damages": [*map(int, damages.groups())] if damages else [],
        "all": passed,
    }


def attacks() -> dict[str, Any]:
    """Return the passed and failed tests of each file."""
    found = {}
    for file in ATTACKS:
        last = pytest(file).splitlines()[-1]
        counts = {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|error|skipped)", last)}
        found[file] = {"passed": 0, "failed": 0, **counts}
        print(file, found[file], flush=True)
    return found


def page(results: dict[str, Any]) -> str:
    """Return reliability.md with all available results."""
    head = "# Killed and stopped\n\nMade by `benchmarks/reliability.py` (`make soak`): runs ended at random "
    head += "times, resumed each time,\nagainst the run that went straight through.\n\n"
    storms = {kind: results[kind] for kind in STORMS if kind in results}
    parts = [head + table(storms)]
    if found := results.get("resume matrix"):
        parts.append(resume_matrix.page(found))
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
    if found := results.get("saves"):
        title = (
            "# Saves cut off, files damaged\n\n`python benchmarks/reliability.py --saves`: a process that "
        )
        title += (
            "ends before each operation on files of a save,\nwith half of the file there where it is to be "
        )
        title += (
            "brought to the disk; each file of a checkpoint with a byte flipped,\na byte less, or gone.\n"
        )
        points = found["crash points"]
        lines = [f"| ended before each operation of {CASES[case]} | {n} |" for case, n in points.items()]
        files, ways = found["damages"]
        lines.append(f"| {files} files of a checkpoint, each in {ways} ways | {files * ways} |")
        withstood = "| | times | withstood |", "|---|---|---|"
        parts.append(
            "\n".join([title, *withstood, *(f"{n} {'all' if found['all'] else 'NOT ALL'} |" for n in lines)])
        )
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
    parser.add_argument("--variants", type=int, default=0, help="signals to each other kind of run")
    parser.add_argument("--resume-matrix", action="store_true", help="every adapter, feed and step")
    parser.add_argument("--rank-kills", type=int, default=0, help="under torchrun --max-restarts, on gloo")
    parser.add_argument("--endurance", type=int, default=0, metavar="STEPS")
    parser.add_argument("--fuzz", type=int, default=0, help="fuzzed recipes")
    parser.add_argument("--seeded", nargs="*", metavar="WORD", help="bugs put back; by words of their names")
    parser.add_argument("--saves", action="store_true", help="crash points of a save, damaged files")
    parser.add_argument("--attacks", action="store_true", help="tests of advisories, secrets and bad inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="do not write the results")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="finetune-soak-"))
    try:
        asked = dict.fromkeys(STORMS, given.variants) | {"kill -9": given.kills, "SIGTERM": given.signals}
        results = {kind: run_storm(folder, kind, n, given.seed) for kind, n in asked.items() if n}
        bad = [k for k, r in results.items() if r["parts that differ"] or r["published that do not verify"]]
        if given.resume_matrix:
            results["resume matrix"] = resume_matrix.run(folder, start)
            cells = results["resume matrix"]["cells"]
            bad += [name for name, one in cells.items() if one["differing"]]
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
    if given.saves:
        results["saves"] = saves()
        bad += [] if results["saves"]["all"] else ["saves"]
    if given.attacks:
        results["attacks"] = attacks()
        bad += [file for file, one in results["attacks"].items() if one["failed"]]
    print(json.dumps(results, indent=1))
    if not given.keep:
        before = json.loads(RESULTS.read_text(encoding="utf-8"))
        if "seeded" in results:  # some bugs may be missing
            found = {**before.get("seeded", {}).get("found", {}), **results["seeded"]["found"]}
            known = {bug.name: found[bug.name] for bug in seeded_bugs.BUGS if bug.name in found}
            results["seeded"]["found"] = known
        results = {**before, **results}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        TABLE.write_text(page(results), encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
