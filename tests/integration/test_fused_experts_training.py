"""Whole runs of a mixture of experts with the fused forward: the same losses, and what the run says of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support.soak import soak_except
from support.tiny_models import recipe, save, sizes

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
ADAPTER = {  # rsLoRA and LoRA+
    "type": "lora", "use_rslora": True, "loraplus_lr_ratio": 4, "r": 4, "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip


@pytest.mark.parametrize("compiled", soak_except([False], [False, True]))
def test_a_run_with_fused_experts_learns_what_pefts_does(compiled: bool, tmp_path: Path, capsys) -> None:
    """That they compile without a break: test_fused_experts.py."""
    config = transformers.Qwen3MoeConfig(**sizes(**EXPERTS, head_dim=8))
    model = save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    found: dict[str, Any] = {}
    for name, speed in {
        "own": ("fused=false", "compile=false"),
        "fused": ("fused=true", f"compile={str(compiled).lower()}"),
    }.items():
        folder = tmp_path / name
        path = recipe(tmp_path, model, adapter=ADAPTER)
        given = [f"speed.{one}" for one in speed] + [f"train.output_dir={folder}", "train.max_steps=3"]
        assert main.main(["train", str(path), *given]) == 0, capsys.readouterr().err
        run = RunFolder(folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        checks = {one["option"]: one for one in json.loads((folder / "checks.json").read_text())}
        weights = load_file(run.adapter / "adapter_model.safetensors")
        found[name] = [line["loss"] for line in lines if "loss" in line], checks, weights
    (own, _, theirs), (losses, checks, weights) = found["own"], found["fused"]
    assert losses == pytest.approx(own, abs=1e-4)
    assert "experts of 2 of 2 layers" in checks["speed.fused"]["actual"]
    assert not compiled or checks["speed.compile"]["passed"]
    assert checks["speed.loss"]["actual"].startswith("chunked")
    assert weights.keys() == theirs.keys() and any("experts" in key for key in weights)
    assert all(weights[key].shape == theirs[key].shape for key in weights)
