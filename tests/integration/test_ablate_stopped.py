"""An ablation that ends before its runs do: told to, or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from finetune.cli import main
from support.paths import QUICKSTART, ROOT


@pytest.fixture
def endless(tmp_path, small, two_layers) -> list[str]:
    """An ablation whose first run does not end."""
    (tmp_path / "ablation.yaml").write_text("measure: {steps: 9999}\nbaseline: {}\noptimizations: []\n")
    words = ["ablate", str(QUICKSTART), *small, f"model.name={two_layers}", "train.effective_batch_size=2"]
    return [*words, "--optimizations", str(tmp_path / "ablation.yaml"), "--output", str(tmp_path / "results")]


def trains(folder: Path) -> None:
    """Wait until that run has made a step."""
    metrics = folder / "results" / "baseline" / "quickstart-baseline-1" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.soak
def test_a_run_ends_with_its_ablation(tmp_path, endless: list[str]) -> None:
    """Also by SIGKILL, without a word."""
    process = subprocess.Popen([sys.executable, "-m", "finetune", *endless], cwd=ROOT)
    trains(tmp_path)
    made = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(timeout=60)
    assert len(made) >= 2 and psutil.wait_procs(made, timeout=30)[1] == []


def test_an_ablation_that_is_told_to_stop_ends_its_run_and_says_how_to_go_on(
    tmp_path, endless: list[str], capsys
) -> None:
    """In this process: the server that runs are forked from stays, as do those that were there before."""
    this = psutil.Process()
    before, made = {*this.children(recursive=True)}, list[psutil.Process]()

    def stop() -> None:
        trains(tmp_path)
        new = {*this.children(recursive=True)} - before
        made.extend(process for process in new if process.ppid() != this.pid)
        os.kill(this.pid, signal.SIGTERM)

    teller = threading.Thread(target=stop)
    teller.start()
    assert main.main(endless) == 75
    teller.join()
    said = capsys.readouterr().err
    assert "stopped by SIGTERM" in said and "run the same command again to continue" in said
    assert made and psutil.wait_procs(made, timeout=30)[1] == []
