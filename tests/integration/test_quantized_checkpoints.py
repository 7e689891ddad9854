"""Train and merge on checkpoints that are quantized already."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.cli import main
from finetune.recipe import loader
from support import quantized_checkpoints
from support.paths import MODEL
from support.soak import soak_except

RATE = "train.learning_rate=1e-2"
STEPS = "train.max_steps=4"
STORAGES = ("nf4", "fp4", "int8", "fp8", "mxfp4", "compressed")


def checkpoint(storage: str, plain: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A quantized copy of a model, and the weights that its codes stand for, where this file knows them."""
    if storage == "fp8":
        return quantized_checkpoints.fp8_in_blocks(plain, folder)
    if storage == "mxfp4":
        return quantized_checkpoints.mxfp4_of_gpt_oss(MODEL, folder, 4096)
    if storage == "compressed":
        return quantized_checkpoints.fp8_by_rows(plain, folder)
    return quantized_checkpoints.bitsandbytes(plain, folder, storage), {}


def check_of(run: Any, option: str) -> dict[str, Any]:
    checks = json.loads((run.path / "checks.json").read_text())
    return next(one for one in checks if one["option"] == option)


@pytest.mark.parametrize("storage", soak_except(("nf4", "int8", "mxfp4", "compressed"), STORAGES))
def test_lora_on_a_quantized_checkpoint_trains_and_merges_into_whole_weights(
    storage: str, two_layers: Path, train: Any, tmp_path: Path
) -> None:
    folder, whole = checkpoint(storage, two_layers, tmp_path / storage)
    run = train(f"model.name={folder}", STEPS, "train.learning_rate=1e-3")
    stays = storage in ("nf4", "fp4", "int8")
    said = check_of(run, "model.quantization")
    assert said["expected"] == (storage if stays else "dequantized to float32") and said["passed"]
    resolved = loader.load(run.recipe).model.quantization
    assert resolved == (storage if stays else "none")
    assert main.main(["merge", str(run.path), "--dtype", "float32", "--quiet"]) == 0
    merged = run.path / "merged"
    assert "quantization_config" not in (merged / "config.json").read_text()
    tensors = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for name, weight in whole.items():  # the adapter's update is small beside the weight
        if name in tensors:
            assert (tensors[name] - weight).norm() < 0.2 * weight.norm(), name
    AutoModelForCausalLM.from_pretrained(merged)


def test_qlora_keeps_the_experts_of_an_mxfp4_checkpoint(train: Any, tmp_path: Path) -> None:
    folder, whole = checkpoint("mxfp4", MODEL, tmp_path / "mxfp4")
    given = (f"model.name={folder}", "adapter.type=qlora", STEPS, "train.learning_rate=1e-3")
    run = train(*given)
    said = check_of(run, "model.quantization")
    assert said["expected"] == "nf4" and said["passed"]
    assert said["actual"].endswith("experts: 0.19 MiB (in bf16) in 0.05 MiB, in mxfp4 as stored")
    assert loader.load(run.recipe).model.quantization == "nf4"
    assert main.main(["merge", str(run.path), "--dtype", "float32", "--quiet"]) == 0
    tensors = load_file(run.path / "merged" / "model.safetensors")
    assert all(torch.equal(tensors[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize("storage", soak_except(("fp8",), ("fp8", "mxfp4")))
def test_full_fine_tuning_of_a_checkpoint_in_fp8_saves_whole_weights(
    storage: str, two_layers: Path, train: Any, tmp_path: Path
) -> None:
    """transformers would save them in fp8 again, without the config that says so."""
    folder, whole = checkpoint(storage, two_layers, tmp_path / storage)
    run = train(f"model.name={folder}", "adapter.type=full", "train.learning_rate=1e-4")
    tensors = load_file(run.model / "model.safetensors")
    assert not [name for name, tensor in tensors.items() if tensor.dtype != torch.float32]
    moved = [name for name in whole if name in tensors]
    assert moved and all((tensors[name] - whole[name]).abs().max() < 1e-2 for name in moved)
    assert "quantization_config" not in (run.model / "config.json").read_text()


@pytest.mark.parametrize("kind", soak_except(("dora",), ("dora", "adalora", "ia3", "qlora")))
def test_other_types_train_on_a_4_bit_checkpoint(
    kind: str, two_layers: Path, train: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint("nf4", two_layers, tmp_path / "nf4")
    run = train(f"model.name={folder}", f"adapter.type={kind}", STEPS, RATE)
    assert check_of(run, "model.quantization")["expected"] == "nf4"
    assert main.main(["merge", str(run.path), "--dtype", "float32", "--quiet"]) == 0


def test_added_tokens_on_a_4_bit_checkpoint_are_in_the_merged_weights(
    two_layers: Path, train: Any, tmp_path: Path
) -> None:
    folder, _ = checkpoint("nf4", two_layers, tmp_path / "nf4")
    run = train(f"model.name={folder}", "model.add_tokens=[<call>, <end>]", STEPS, RATE)
    assert main.main(["merge", str(run.path), "--dtype", "float32", "--quiet"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(run.path / "merged")
    assert merged.get_input_embeddings().num_embeddings == 4098


def test_train_on_codes_that_no_config_declares_names_them(
    two_layers: Path, train: Any, tmp_path, capsys
) -> None:
    """As a GPTQ model whose config.json was replaced by that of its base."""
    folder, _ = checkpoint("fp8", two_layers, tmp_path / "codes")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name.replace(".weight", ".qweight")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    train(f"model.name={folder}", "adapter.target_modules=null", code=2)
    assert "config.json has no quantization_config" in capsys.readouterr().err
