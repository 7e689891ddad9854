"""`qlora` and int8 on a mixture of experts, from the recipe to the merged model."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune import Run
from finetune.cli import main
from finetune.quantization import stacked_experts
from finetune.quantization.bnb_loading import FourBitConfig
from finetune.run_folder.run_folder import RunFolder
from support import four_bit
from support.expert_families import config_of
from support.paths import MODEL
from support.tiny_models import recipe, save

if TYPE_CHECKING:
    from pathlib import Path

IDS = torch.arange(5, 37).view(2, 16)
QLORA = {"type": "qlora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear-and-experts"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> Path:
    """The folder of a finished qlora run and of its base model."""
    folder = tmp_path_factory.mktemp("qlora")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "vocab_size": len(tokenizer)}
    config = config_of("qwen3_moe", **sizes, **ids)
    save(folder / "model", AutoModelForCausalLM.from_config(config))
    train = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    path = recipe(folder, folder / "model", adapter=QLORA, train=train)
    assert main.main(["train", str(path)]) == 0
    return folder


def checks_of(run: Path) -> dict[str, dict[str, Any]]:
    return {one["option"]: one for one in json.loads((run / "checks.json").read_text())}


def test_run_says_what_is_quantized(trained: Path) -> None:
    found = checks_of(trained / "run")["model.quantization"]
    assert "; experts: " in found["actual"] and "not quantized" not in found["actual"]
    assert all(check["passed"] for check in checks_of(trained / "run").values())


def test_adapter_is_that_of_the_plain_model(trained: Path) -> None:
    """It opens with plain PEFT on the weights in fp32, and changes as much as on the quantized weights."""
    base: Any = AutoModelForCausalLM.from_pretrained(trained / "model")
    config = FourBitConfig(
        bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    stored: Any = AutoModelForCausalLM.from_pretrained(
        trained / "model", quantization_config=config, dtype=torch.float32
    )
    stacked_experts.dequantize(stored)
    four_bit.without_repacking(stored)
    with torch.no_grad():
        plain = base.eval()(IDS).logits
        tuned = PeftModel.from_pretrained(base, RunFolder(trained / "run").adapter).eval()
        change = tuned(IDS).logits - plain
        before = stored.eval()(IDS).logits
        after = PeftModel.from_pretrained(stored, RunFolder(trained / "run").adapter).eval()(IDS).logits
        loaded = Run(trained / "run").load_model()
        assert torch.allclose(loaded(IDS).logits, after, atol=1e-4)
    assert change.norm() > 1e-4 and (after - before - change).norm() < 0.5 * change.norm()


def test_it_merges_into_the_weights_that_it_was_trained_on(trained: Path, capsys: Any) -> None:
    assert main.main(["merge", str(trained / "run"), "--dtype", "float32"]) == 0, capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(trained / "run" / "merged").eval()
    tuned = Run(trained / "run").load_model()
    with torch.no_grad():
        assert torch.allclose(merged(IDS).logits, tuned(IDS).logits, atol=1e-4)
    plain = dict(AutoModelForCausalLM.from_pretrained(trained / "model").named_parameters())
    stacks = {name: weight for name, weight in merged.named_parameters() if weight.dim() == 3}
    assert len(stacks) == 2  # the first layer is dense
    for name, weight in stacks.items():  # as far from the plain weights as NF4 and the adapter move them
        assert 0.02 < float((weight - plain[name]).norm().detach() / plain[name].norm().detach()) < 0.5


def test_it_resumes_to_the_same_weights(trained: Path, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-4")
    given = [f"train.output_dir={tmp_path / 'run'}"]
    assert main.main(["train", str(trained / "recipe.yaml"), "--resume", *given]) == 0, (
        capsys.readouterr().err
    )
    name = "adapter_model.safetensors"
    ours, first = (RunFolder(folder / "run").adapter / name for folder in (tmp_path, trained))
    assert ours.read_bytes() == first.read_bytes()


def test_int8_quantizes_experts_too(trained: Path, tmp_path: Path, capsys: Any) -> None:
    adapter = {**QLORA, "type": "lora"}
    path = recipe(tmp_path, trained / "model", adapter=adapter)
    assert main.main(["train", str(path), "model.quantization=int8"]) == 0, capsys.readouterr().err
    assert "; experts: " in checks_of(tmp_path / "run")["model.quantization"]["actual"]


def test_sharding_of_quantized_experts_is_refused(trained: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert main.main(["check", str(trained / "recipe.yaml")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "can't shard quantized experts" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("adapter.r=129",), "help: adapter.r: 128"),
        (("adapter.r=65", "adapter.target_modules=[q_proj, gate_proj, up_proj]"), "help: adapter.r: 64"),
        (("adapter.init_lora_weights=eva",), "can't read a model with quantized experts"),
    ],
)
def test_options_that_quantized_experts_do_not_support(
    trained: Path, capsys: Any, change: tuple[str, ...], said: str
) -> None:
    for command in ("check", "train", "plan"):
        assert main.main([command, str(trained / "recipe.yaml"), *change]) == 2, command
        assert said in " ".join(capsys.readouterr().err.split()), command
