"""Weights in the format of compressed-tensors: transformers reads them with its own quantizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.core.errors import UserError
from finetune.export import compressed_export
from finetune.kernels.ops import quantize_rows
from support import exports

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors (the extra `export`)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exports.model_of("llama_tied", tmp_path_factory.mktemp("llama_tied"))


@pytest.mark.parametrize("kind", compressed_export.KINDS)
def test_export_to_compressed_tensors_answers_as_the_model_does(
    kind: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = compressed_export.write(exports.job_of(saved, kind), tmp_path)
    assert "ompress" not in capsys.readouterr().err, "the bars of the library"
    check = report["serving_check"]
    assert check["token_ids"] == {"prompts": 8, "different": 0} and check["stop_tokens"]["missing"] == []
    assert check["answers"]["agree"] and check["loss"]["agree"]
    assert report["layers"] == {"quantized": 14, "plain": ["lm_head"]}
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights and weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    size, before = report["files"]["model.safetensors"], (saved / "model.safetensors").stat().st_size
    assert size < 0.45 * before


def test_fp8_weights_and_scales_are_those_of_an_fp8_base_model(saved: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    compressed_export.save(model, "fp8", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    scales = [name for name in weights if name.endswith(".weight_scale")]
    for name in scales:
        weight = name.removesuffix("_scale")
        codes, scale = quantize_rows(before[weight])
        assert weights[weight].dtype == codes.dtype and weights[name].dtype == torch.float32
        assert torch.equal(weights[weight].float(), codes.float()) and torch.equal(weights[name], scale)
    assert len(scales) == 14


@pytest.mark.parametrize("fault", ["scale", "layer"])
def test_check_catches_a_fault_in_quantized_weights(fault: str, saved: Path, tmp_path: Path) -> None:
    job = exports.job_of(saved, "fp8")
    compressed_export.write(job, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    if fault == "scale":
        weights[f"{name}_scale"] *= 2
    else:
        for end in ("", "_scale"):
            weights[name + end] = weights[f"{name}{end}".replace("layers.0", "layers.1")].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="differs from the merged weights"):
        compressed_export.check_weights(tmp_path, job.source)


def test_check_refuses_experts() -> None:
    config = AutoConfig.for_model(**exports.SIZES, model_type="mixtral", num_local_experts=4)
    with pytest.raises(UserError, match="no experts"):
        compressed_export.check(config, "fp8")
