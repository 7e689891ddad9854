"""Some of the soak: kills and signals at random times (`make soak` also kills ranks)."""

import json
import os
import subprocess
import sys

import pytest

from support.paths import ROOT

COUNTS = {"kill -9": 5, "SIGTERM": 2}  # `make soak` also while it evaluates, with workers, on two ranks


@pytest.mark.soak
def test_what_is_killed_or_stopped_at_any_time_goes_on_bit_for_bit() -> None:
    """Runs that prune AdaLoRA's ranks, killed; LoRA with dropout, told to stop."""
    words = ["--kills", str(COUNTS["kill -9"]), "--signals", str(COUNTS["SIGTERM"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "benchmarks/reliability.py", *words, "--keep", "--seed", "7"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.keys() == COUNTS.keys()
    for kind, count in COUNTS.items():
        assert found[kind]["resumed"] == count and found[kind]["exit codes of the end"] == [75, 75]
        assert set(found[kind]["ended"]) <= {"-9" if kind == "kill -9" else "75"}
        assert found[kind]["tensors compared"] > 100 and not found[kind]["parts that differ"]
        assert not found[kind]["published that do not verify"]
