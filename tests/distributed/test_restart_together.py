"""One process of a launch runs out of memory while the other waits in a collective: both start again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from finetune.distributed import launch_environment, restart_together
from finetune.run_folder.run_folder import RunFolder
from finetune.training.auto_correction import CHECKPOINTING
from support import fsdp_on_cpus, two_ranks
from support.faulty_runs import same, weights
from support.paths import QUICKSTART, ROOT
from support.runs import metrics, run_checks

SCRIPT = ROOT / "tests" / "support" / "short_of_memory.py"


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    config = ROOT / "accelerate_configs" / "cpu_2.yaml"
    command = [sys.executable, "-m", "finetune.launch", "--config_file", str(config), str(SCRIPT), *words]
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    own[launch_environment.TIMEOUT] = "120"
    return subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False
    )


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_out_of_memory_on_one_rank_restarts_all_with_the_stronger_setting(
    small, two_layers, tmp_path
) -> None:
    """Equal to a run that was told to: the same losses and weights, to the bit."""
    given = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", "train.max_steps=3"]
    given += ["train.effective_batch_size=4", "adapter.lora_dropout=0.1", "train.warmup_steps=0"]
    given += ["eval.forgetting=false", "eval.max_new_tokens=1", "eval.samples=0", "train.logging_steps=1"]
    runs = {name: RunFolder(tmp_path / name) for name in ("auto", "told")}
    done = launch(*given, f"train.output_dir={runs['auto'].path}")
    assert done.returncode == 0, done.stderr[-4000:]
    said = f"note: the first step ran out of memory with {CHECKPOINTING}: none; `auto` takes norms"
    assert done.stdout.count(said) == 1 and (runs["auto"].path / "log.txt").read_text().count(said) == 1
    assert run_checks(runs["auto"])[f"{CHECKPOINTING}, auto after out of memory"]["actual"] == "norms"
    assert run_checks(runs["auto"])["sharded by FSDP"]["actual"].startswith("50.0%")
    told = [*given, f"train.output_dir={runs['told'].path}", f"{CHECKPOINTING}=norms"]
    environment = fsdp_on_cpus.ENVIRONMENT | {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    two_ranks.run(fsdp_on_cpus.command, told, ACCELERATE_MIXED_PRECISION="no", **environment)
    losses = [[line["loss"] for line in metrics(run)] for run in runs.values()]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert same(*map(weights, runs.values()))


def test_a_process_of_no_launch_is_not_replaced(monkeypatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert restart_together.possible()
    monkeypatch.delenv("MASTER_PORT")
    assert not restart_together.possible()
