"""Checkpoints in fp8 already: taken as they are, whatever their names, or refused with the remedy."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.core.errors import Exit, UserError
from finetune.core.run_checks import RunChecks
from finetune.kernels import ops
from finetune.models import quantization_checks
from finetune.quantization import fp8_linear
from support.fp8_models import IDS, error, load
from support.paths import MODEL
from support.trainers import given


def checkpoint(folder: Path, strategy: str, **config: object) -> dict[str, torch.Tensor]:
    """The embedded model as compressed-tensors stores it: codes, and a bf16 scale for each row or weight."""
    tensors = load_file(MODEL / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight") and "layers.0.mlp" not in name]:
        weight = tensors[name].float()
        largest = weight.abs().amax(-1, keepdim=True) if strategy == "channel" else weight.abs().max()[None]
        scale = (largest / 400).bfloat16()  # another rule than ours
        tensors[name] = (weight / scale.float()).to(ops.E4M3)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**text, "quantization_config": {**compressed(strategy), **config}})
    )
    return tensors


def compressed(strategy: str) -> dict[str, object]:
    """What such a checkpoint's config says."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        **groups,
    }


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_a_checkpoint_in_fp8_is_taken_byte_for_byte(strategy: str, tmp_path) -> None:
    stored = checkpoint(tmp_path, strategy)
    base, checks = load(tmp_path), RunChecks()
    layers = {name: m for name, m in base.named_modules() if isinstance(m, fp8_linear.Fp8Linear)}
    assert len(layers) == 39
    for name, module in layers.items():
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert torch.equal(module.weight.view(torch.uint8), codes.view(torch.uint8))
        assert module.weight_scale.dtype == torch.float32
        assert torch.equal(module.weight_scale, scale.float().reshape(-1, 1).expand_as(module.weight_scale))
    quantization_checks.add_fp8_check(base, checks)
    assert "3 are not fp8 in the checkpoint" in checks.as_json()[0]["actual"]
    with torch.no_grad():
        assert error(base(IDS).logits, load()(IDS).logits) < 0.15


def test_so_is_one_whose_names_transformers_changes(tmp_path) -> None:
    """Gemma 3's checkpoints have `language_model.model.layers` for `model.language_model.layers`."""
    config, tensors = AutoConfig.for_model("gemma3", **given("gemma3")), dict[str, torch.Tensor]()
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, tensor in made.state_dict().items():
        old = name.replace("model.language_model.", "language_model.model.")
        old = re.sub(r"^model\.(vision_tower|multi_modal_projector)", r"\1", old)
        if "language_model" in name and name.endswith("proj.weight"):
            tensors[f"{old}_scale"] = scale = tensor.abs().amax(-1, keepdim=True) / 400
            tensor = (tensor / scale).to(ops.E4M3)
        tensors[old] = tensor.clone()
    made.config.quantization_config = compressed("channel")
    made.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    layers = {name: m for name, m in load(tmp_path).named_modules() if isinstance(m, fp8_linear.Fp8Linear)}
    assert len(layers) == 14
    for name, module in layers.items():
        codes = tensors[f"{name.replace('model.language_model.', 'language_model.model.')}.weight"]
        assert torch.equal(module.weight.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize(
    "held",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "config_groups": {}},
        {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}},
        {"quant_method": "gptq", "bits": 4, "config_groups": {}},
    ],
)
def test_other_quantized_checkpoints_are_refused_with_the_remedy(held, tmp_path) -> None:
    checkpoint(tmp_path, "channel", **held)
    with pytest.raises(UserError, match="the 16-bit checkpoint") as raised:
        load(tmp_path)
    assert raised.value.code == Exit.INPUT
