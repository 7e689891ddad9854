"""Folders of models whose weights are quantized already, as other programs save them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32  # sides of a block with one scale


def declare(folder: Path, **quantization: Any) -> Path:
    """Write a `quantization_config` into a model's config.json, and change no weight."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return folder


def bitsandbytes(plain: Path, folder: Path, storage: str) -> Path:
    """The model as the Hub's `...-bnb-4bit` hold it: loaded in nf4, fp4 or int8, and saved."""
    import transformers

    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    if storage != "int8":
        options = {"bnb_4bit_quant_type": storage, "bnb_4bit_compute_dtype": torch.bfloat16}
        config = transformers.BitsAndBytesConfig(load_in_4bit=True, **options)
    _copy(plain, folder)
    made = transformers.AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=config, dtype=torch.bfloat16
    )
    made.save_pretrained(folder)
    return folder


def fp8_in_blocks(plain: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Store the model as DeepSeek's and Qwen's `-FP8`, and return its dequantized weights."""
    _copy(plain, folder)
    tensors, whole = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        rows, columns = (size // BLOCK for size in weight.shape)
        blocks = weight.reshape(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale[:, None, :, None]
        codes = (blocks / spread).to(E4M3)
        whole[name] = (codes.float() * spread).reshape(weight.shape)
        tensors[name], tensors[f"{name}_scale_inv"] = codes.reshape(weight.shape), scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    return declare(folder, quant_method="fp8", **config), whole


def fp8_by_rows(plain: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Store the model as compressed-tensors does, with a scale for each row, and return its dequantized
    weights."""
    _copy(plain, folder)
    tensors, whole = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name].float()
        scale = (weight.abs().amax(-1, keepdim=True) / 400).bfloat16()
        tensors[name], tensors[f"{name}_scale"] = (weight / scale.float()).to(E4M3), scale
        whole[name] = tensors[name].float() * scale.float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    given = {"format": "float-quantized", "ignore": ["lm_head"], "config_groups": groups}
    return declare(folder, quant_method="compressed-tensors", **given), whole


def mxfp4_of_gpt_oss(tokenizer: Path, folder: Path, vocabulary: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """Store a tiny gpt-oss with experts in mxfp4, as OpenAI's, and return their dequantized weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    ids = {"vocab_size": vocabulary, "pad_token_id": 0, "eos_token_id": 3, "num_experts_per_tok": 2}
    config = AutoConfig.for_model("gpt_oss", **sizes, **heads, **ids, max_position_embeddings=512)
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    tensors, whole = load_file(folder / "model.safetensors"), dict[str, torch.Tensor]()
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes[..., 0::2] | (codes[..., 1::2] << 4)  # the first in the low bits
        tensors[f"{name}_scales"] = scales
        numbers = torch.tensor(E2M1)[codes.long()] * torch.exp2(scales.float() - 127)[..., None]
        whole[name] = numbers.reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return declare(folder, quant_method="mxfp4", modules_to_not_convert=left), whole


def _copy(plain: Path, folder: Path) -> None:
    """Everything but the weights."""
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
