"""On a GPU a resumed run is the run itself: bit for bit where two straight runs are, else as near as they."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune.checkpointing import checkpoints
from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support.paths import DATA, MODEL, QUICKSTART
from support.runs import metrics
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
STEPS = 6
KINDS = {
    "lora": [],
    "dora": [],
    "adalora": ["adapter.tinit=1", "adapter.tfinal=1"],
    "qlora": [],
    "full": ["train.learning_rate=5e-4"],
    "packed": ["adapter.type=lora", "data.packing=true", "data.max_length=512"],
    "compiled": ["adapter.type=lora", "speed.compile=true"],
    "graphs": ["adapter.type=lora", "data.packing=true", "data.max_length=512", "speed.compile=true"],
    "fp8": ["adapter.type=lora", "model.quantization=fp8"],
    "offloaded": ["adapter.type=lora", "speed.offload=all"],
}


def train(kind: str, folder: Path, *given: str) -> Path:
    rows = f"data.name={DATA / 'train.jsonl'}"
    short = [rows, "data.validation=null", f"model.name={MODEL}", f"train.max_steps={STEPS}"]
    short += ["train.effective_batch_size=8", "train.warmup_steps=0", "train.logging_steps=1"]
    short += ["train.save_steps=3", "train.save_total_limit=null", "eval.forgetting=false", "eval.samples=0"]
    kinds = KINDS[kind] if any("adapter.type" in one for one in KINDS[kind]) else [f"adapter.type={kind}"]
    words = [*short, *kinds, *KINDS[kind], f"train.output_dir={folder}", *given, "--quiet"]
    assert main.main(["train", str(QUICKSTART), *words]) == 0
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer after the last step."""
    path = folder / "checkpoints" / f"step-{STEPS}"
    checkpoints.verify(path)
    names = ("weights.safetensors", "optimizer.safetensors")
    return {f"{n} {key}": t for n in names for key, t in checkpoints.read_tensors(path, n).items()}


def apart(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((tensor.double() - two[name].double()).abs().max()) for name, tensor in one.items())


@pytest.mark.parametrize(
    "kind", soak_except(["adalora", "qlora", "full", "compiled", "graphs", "offloaded"], KINDS)
)
def test_a_resumed_run_is_the_run_itself(kind: str, tmp_path: Path) -> None:
    if kind == "fp8" and not FP8:
        pytest.skip("no fp8 GEMMs")
    whole, same = train(kind, tmp_path / "whole"), train(kind, tmp_path / "same")
    again, middle = tmp_path / "again", whole / "checkpoints" / "step-3"
    shutil.copytree(middle, again / "checkpoints" / "step-3")
    shutil.copy(whole / "metrics.jsonl", again)
    train(kind, again, "--resume")
    noise = apart(state(whole), state(same))
    assert apart(state(whole), state(again)) <= 2 * noise, f"two straight runs are {noise} apart"
    losses: list[list[Any]] = [[line["loss"] for line in metrics(RunFolder(run))] for run in (whole, again)]
    assert losses[1] == (losses[0] if noise == 0 else pytest.approx(losses[0], rel=1e-3))
