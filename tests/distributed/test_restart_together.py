"""One process of a launch runs out of memory while the other waits in a collective: both start again."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from finetune.distributed import launch_environment, restart_together
from finetune.run_folder.run_folder import RunFolder
from finetune.training.auto_correction import CHECKPOINTING
from support.faulty_runs import same, weights
from support.paths import QUICKSTART, ROOT
from support.runs import metrics, receipts

if TYPE_CHECKING:
    from pathlib import Path

# FSDP2 on two CPU ranks, as test_fsdp.py starts it. In the first step rank 1 has no memory for a forward of
# the second layer, unless norms are recomputed; rank 0 waits for its part of that layer's weights
SCRIPT = """
import os, sys, threading

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers.models.llama import modeling_llama

from finetune.cli import main
from finetune.preflight import launch_conflicts

os.environ.update(
    ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_RESHARD_AFTER_FORWARD="true",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT", FSDP_CPU_RAM_EFFICIENT_LOADING="false",
)
begin, forward = PartialState.__init__, modeling_llama.LlamaDecoderLayer.forward

def as_on_gpus(self, *args, **given):
    begin(self, *args, **given)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU

def short_of_memory(self, *args, **given):
    in_first_step = any(thread.name == "first step" for thread in threading.enumerate())
    recomputes = "forward" in vars(self.input_layernorm)
    if in_first_step and not recomputes and self.self_attn.layer_idx == 1 and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return forward(self, *args, **given)

PartialState.__init__ = as_on_gpus
modeling_llama.LlamaDecoderLayer.forward = short_of_memory
launch_conflicts._sharding = lambda *given: []
if __name__ == "__main__":
    sys.exit(main.main(sys.argv[1:]))
"""


def launch(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    config = ROOT / "accelerate_configs" / "cpu_2.yaml"
    command = [sys.executable, "-m", "finetune.launch", "--config_file", str(config), str(script), *words]
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    own[launch_environment.TIMEOUT] = "120"
    return subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False
    )


@pytest.mark.usefixtures("the_only_launch")
def test_out_of_memory_on_one_rank_restarts_all_with_the_stronger_setting(
    small, two_layers, tmp_path
) -> None:
    """Equal to a run that was told to: the same losses and weights, to the bit."""
    script = tmp_path / "trains.py"
    script.write_text(SCRIPT)
    given = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", "train.max_steps=3"]
    given += ["train.effective_batch_size=4", "adapter.lora_dropout=0.1", "train.warmup_steps=0"]
    given += ["eval.forgetting=false", "eval.max_new_tokens=1", "eval.samples=0", "train.logging_steps=1"]
    runs = {name: RunFolder(tmp_path / name) for name in ("auto", "told")}
    done = launch(script, *given, f"train.output_dir={runs['auto'].path}")
    assert done.returncode == 0, done.stderr[-4000:]
    said = f"note: the first step ran out of memory with {CHECKPOINTING}: none; `auto` takes norms"
    assert done.stdout.count(said) == 1 and (runs["auto"].path / "log.txt").read_text().count(said) == 1
    assert receipts(runs["auto"])[f"{CHECKPOINTING}, auto after out of memory"]["actual"] == "norms"
    assert receipts(runs["auto"])["split by FSDP"]["actual"].startswith("50.0%")
    told = launch(script, *given, f"train.output_dir={runs['told'].path}", f"{CHECKPOINTING}=norms")
    assert told.returncode == 0, told.stderr[-4000:]
    losses = [[line["loss"] for line in metrics(run)] for run in runs.values()]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert same(*map(weights, runs.values()))


def test_a_process_of_no_launch_is_not_replaced(monkeypatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert restart_together.possible()
    monkeypatch.delenv("MASTER_PORT")
    assert not restart_together.possible()
