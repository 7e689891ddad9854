"""`finetune check --rehearse`: how it kills a run; its whole life is in test_faults.py."""

import subprocess
import sys

import psutil
import pytest

from finetune.experiments.runner import rehearsal

RUN = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
run = pathlib.Path(sys.argv[1])
with (run / "metrics.jsonl").open("w") as log:
    for step in range(1, int(sys.argv[2]) + 1):
        print(f'{{"step": {step}}}', file=log, flush=True)
        (run / "checkpoints" / f"step-{step}").mkdir(parents=True)
        time.sleep(0.1)
    print('{"step": ', end="", file=log, flush=True)
    time.sleep(60 if len(sys.argv) < 4 else 0)
child.kill()
"""


def test_kill_after_ends_a_run_and_its_children(tmp_path) -> None:
    """A trainer beside a launcher would go on, and save."""
    line = [sys.executable, "-c", RUN, str(tmp_path), "3"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
        rehearsal._kill_after(2, tmp_path, process)
        assert process.wait(10) == -9
        psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert rehearsal._logged(tmp_path) >= 2


@pytest.mark.parametrize("steps", ["1", "0"])
def test_kill_after_leaves_a_run_that_is_not_so_far(steps: str, tmp_path) -> None:
    line = [sys.executable, "-c", RUN, str(tmp_path), steps, "ends"]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        rehearsal._kill_after(2, tmp_path, process)
        assert process.wait(10) == 0
