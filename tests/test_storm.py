"""A quarter of the soak's kills and signals at random times (`make soak`: benchmarks/reliability.py)."""

import json
import os
import subprocess
import sys

from conftest import ROOT

COUNTS = {"kill -9": 25, "SIGTERM": 12}


def test_what_is_killed_or_stopped_at_any_time_goes_on_bit_for_bit() -> None:
    """Runs that prune AdaLoRA's ranks, killed; LoRA with dropout, told to stop."""
    words = ["--kills", str(COUNTS["kill -9"]), "--signals", str(COUNTS["SIGTERM"]), "--keep", "--seed", "7"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "benchmarks/reliability.py", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    for kind, count in COUNTS.items():
        assert found[kind]["resumed"] == count and found[kind]["exit codes of the end"] == [75, 75]
        assert set(found[kind]["ended"]) <= {"kill -9": {"-9"}, "SIGTERM": {"75"}}[kind]
        assert found[kind]["tensors compared"] > 100 and not found[kind]["parts that differ"]
        assert not found[kind]["published that do not verify"]
