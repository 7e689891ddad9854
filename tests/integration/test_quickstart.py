"""The promise of the quickstart, as written: base under 5 %, tuned at 90 % or more."""

import json
import subprocess
import sys
import time

from finetune.run_folder.run_folder import RunFolder
from support.paths import DATA, QUICKSTART, ROOT


def test_the_quickstart_keeps_its_promise(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "finetune",
        "train",
        str(QUICKSTART),
        f"train.output_dir={tmp_path / 'run'}",
    ]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "run")
    scores = run.read("eval.json")
    assert scores["base"]["exact_match"] < 0.05
    assert scores["tuned"]["exact_match"] >= 0.90, f"{scores['tuned']} after {seconds:.0f} s"
    assert all(receipt["passed"] for receipt in run.read("checks.json"))
    for part in ("plan", "run checks passed", "result", "next:", "finetune merge"):
        assert part in done.stdout
    assert done.stderr == "", "nothing the user can't act on"
    assert len(scores["samples"]) == 3


def test_rows_are_as_many_and_as_new_as_promised() -> None:
    train, test = (
        [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "test")
    )
    assert (len(train), len(test)) == (2000, 300)

    def values(rows: list[dict], *keys: str) -> set[str]:
        records = [json.loads(row["messages"][-1]["content"]) for row in rows]
        return {record[key] for record in records for key in keys if key in record}

    assert not values(train, "name", "with") & values(test, "name", "with")
    assert not values(train, "city") & values(test, "city")
    assert not values(train, "item") & values(test, "item")
    kinds = [json.loads(row["messages"][-1]["content"])["type"] for row in test]
    assert set(kinds) == {"order", "appointment", "invoice"} and min(map(kinds.count, set(kinds))) > 60
