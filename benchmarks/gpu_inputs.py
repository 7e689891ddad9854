"""Write models and data for gpu.py: random weights with LLaMA's sizes in bf16, fp8 or NF4, and random text.

A checkpoint is written a few layers at a time. torch draws the weights on a GPU if there is one. No model is
ever whole in memory, so a 70B model needs only disk space.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, BitsAndBytesConfig, LlamaConfig

TOKENIZER = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
SHAPES = {  # sizes: hidden, intermediate, layers, heads, key-value heads, vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128256),  # Llama-3.1-8B
    "1b": (2048, 8192, 16, 32, 8, 128256),  # Llama-3.2-1B
    "135m": (576, 1536, 30, 9, 3, 49152),  # SmolLM2-135M, but for a head of its own
    "70b": (8192, 28672, 80, 64, 8, 128256),  # Llama-3-70B
    "tiny": (64, 128, 2, 4, 2, 4096),
}
LAYERS_A_FILE = 4
STD = 0.02  # of every weight, as transformers initializes LLaMA
WORDS = [f"{a}{b}{c}" for a in "bcdfgklm" for b in "aeiou" for c in "nrst"]
MEAN, SIGMA, LONGEST = 400, 1.0, 4096  # tokens of a document: log-normal (median about 245), clipped


def make_model(folder: Path, shape: str, stored: str, layers: int) -> Path:
    """Write a checkpoint with random weights, unless it exists.

    Args:
        stored: `bf16`; `fp8`: e4m3 with a scale for each output, as compressed-tensors names them; `nf4`: as
            transformers saves a model that bitsandbytes quantized. Embeddings, norms and head are bf16.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    hidden, intermediate, _, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=vocabulary, rope_theta=500000.0,
        max_position_embeddings=8192, rms_norm_eps=1e-5, dtype="bfloat16", tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    torch.manual_seed(0)
    files = {}
    for first in range(-1, layers, LAYERS_A_FILE):
        tensors = {}
        for layer in range(first, min(first + LAYERS_A_FILE, layers)):
            tensors |= _outside(config) if layer < 0 else _layer(config, layer, stored)
        name = f"model-{first + 1:05}.safetensors"
        save_file({key: value.cpu() for key, value in tensors.items()}, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(folder)
    text = {**config.to_dict(), **_quantized(stored)}
    (folder / "config.json").write_text(json.dumps(text, indent=1))  # the last: it says that all is there
    torch.cuda.empty_cache()  # this process lives on while a row runs in another
    return folder


def _outside(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Embeddings, last norm and head."""
    size = (config.vocab_size, config.hidden_size)
    parts = {name: _random(*size) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    return {**parts, "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.bfloat16)}


def _layer(config: LlamaConfig, layer: int, stored: str) -> dict[str, torch.Tensor]:
    """The tensors of one decoder layer, by name."""
    hidden, wide = config.hidden_size, config.intermediate_size
    narrow = hidden // config.num_attention_heads * config.num_key_value_heads
    linear = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    made = {f"{n}_layernorm.weight": torch.ones(hidden) for n in ("input", "post_attention")}
    for name, size in linear.items():
        weight = _random(*size)
        if stored == "fp8":
            from finetune.kernels.ops import quantize_rows

            made[f"{name}.weight"], made[f"{name}.weight_scale"] = quantize_rows(weight)
        elif stored == "nf4":
            from bitsandbytes.functional import quantize_4bit

            codes, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
            parts = {f"{name}.weight.{key}": part for key, part in state.as_dict(packed=True).items()}
            made |= {f"{name}.weight": codes, **parts}
        else:
            made[f"{name}.weight"] = weight
    norms = {name: made[name].bfloat16() for name in made if "norm" in name}
    return {f"model.layers.{layer}.{name}": value for name, value in {**made, **norms}.items()}


def _random(*size: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(*size, device=device, dtype=torch.bfloat16).mul_(STD)


def _quantized(stored: str) -> dict[str, Any]:
    """Return the quantization config of a checkpoint."""
    if stored == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        held: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quantization_config": {**held, "ignore": ["lm_head"], "config_groups": groups}}
    if stored == "nf4":
        settings: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
        return {"quantization_config": BitsAndBytesConfig(**settings).to_dict()}
    return {}


def make_data(path: Path, tokens: int, *, documents: bool) -> Path:
    """Return random words: one text of `tokens` tokens with its end, so that all sequences are full, or
    documents of real lengths with at least `tokens` tokens in total.

    Documents have log-normal lengths, of MEAN tokens in the mean, clipped at LONGEST; seeded.
    """
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    draw = random.Random(0)
    size = {word: len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) for word in WORDS}
    first = len(tokenizer(WORDS[0], add_special_tokens=False)["input_ids"])
    lengths = document_lengths(tokens, draw) if documents else [tokens]
    with path.open("w") as file:
        for length in lengths:
            words, left = [WORDS[0]], length - 1 - first  # one is the end's
            while left > 0:  # words have two or three tokens
                fitting = WORDS if left > 4 else [word for word in WORDS if left - size[word] in (0, 2)]
                words.append(draw.choice(fitting))
                left -= size[words[-1]]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def document_lengths(tokens: int, draw: random.Random) -> list[int]:
    """Lengths of documents, `tokens` together at least."""
    location = math.log(MEAN) - SIGMA**2 / 2 + 0.01  # what clipping takes off the mean, given back
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(max(8, min(LONGEST - 8, round(draw.lognormvariate(location, SIGMA)))))
    return lengths
