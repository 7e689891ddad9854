"""Tiny models of each family of mlx-lm, and how far mlx-lm is from transformers on them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from finetune.export import mlx_export
from support import exports

FULL, SLIDING, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
TOKENS = 120
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = ROUTED | {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
SCALES = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}  # fmt: skip
HEAD = {"head_dim": 16}
WINDOW = {"sliding_window": 32, "num_hidden_layers": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "cohere2": HEAD | WINDOW,
    "deepseek_v2": LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    "deepseek_v3": LATENT,
    "ernie4_5": HEAD,
    "exaone4": WINDOW | {"sliding_window_pattern": 4},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    "gemma": HEAD,
    "gemma2": HEAD | {"query_pre_attn_scalar": 16, "sliding_window": 4096},
    "gemma3_text": HEAD | WINDOW | {"query_pre_attn_scalar": 16},
    "glm": HEAD
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "glm4": HEAD,
    "glm4_moe": HEAD | ROUTED,
    "gpt_neox": {"intermediate_size": 256},
    "granite": SCALES,
    "granitemoe": SCALES | LOCAL_EXPERTS,
    "helium": HEAD,
    "llama": {},
    "mamba": {"state_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "chunk_size": 64},
    "mistral": HEAD | {"sliding_window": None},
    "mixtral": HEAD | LOCAL_EXPERTS,
    "nemotron": {},
    "olmo2": {},
    "olmo3": WINDOW | {"num_hidden_layers": 4},
    "olmoe": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {},
    "phimoe": LOCAL_EXPERTS | {"attention_bias": True, "lm_head_bias": True},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3": HEAD,
    "qwen3_moe": HEAD | EXPERTS,
    "qwen3_next": HEAD
    | EXPERTS
    | {
        "shared_expert_intermediate_size": 32, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "seed_oss": HEAD,
    "smollm3": {"num_hidden_layers": 4},
    "stablelm": {},
    "starcoder2": {},
}  # fmt: skip
"""Model type -> values of a config whose features mlx-lm has."""


def layers(letters: str) -> list[str]:
    """Layer types: F is full attention, S has a sliding window, L is linear attention."""
    return [{"F": FULL, "S": SLIDING, "L": LINEAR_ATTENTION}[letter] for letter in letters]


def config_of(kind: str, **values: Any) -> Any:
    """A tiny config of a model type."""
    sizes = {**exports.SIZES, "max_position_embeddings": 512, "vocab_size": 320}
    if kind in ("mamba", "mamba2"):
        sizes = {key: sizes[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **{**sizes, **special, **FAMILIES.get(kind, {}), **values})


def difference(config: Any, folder: Path) -> float:
    """The largest difference of a log-probability between mlx-lm and transformers, with and without a cache.

    Infinite if mlx-lm can't open the folder.
    """
    mx, utils = importlib.import_module("mlx.core"), importlib.import_module("mlx_lm.utils")
    cache = importlib.import_module("mlx_lm.models.cache")
    auto: Any = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForImageTextToText
    model = _randomized(auto.from_config(config, dtype=torch.float32).eval())
    ids = torch.randint(8, 300, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(ids).logits[0].log_softmax(-1)
    model.save_pretrained(folder)
    mlx_export.write_names(folder)
    read: Any = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(read(ids).logits[0].log_softmax(-1), expected), "transformers reads another model"
    try:
        opened, _ = utils.load_model(folder)
        opened.set_dtype(mx.float32)
        state, whole = cache.make_prompt_cache(opened), opened(mx.array(ids.tolist()))[0]
        parts = [
            opened(mx.array(part.tolist()), cache=state)[0] for part in ids.split([100, *[1] * 20], dim=1)
        ]
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, AssertionError):
        return float("inf")
    found = [whole] if _keeps_old_keys(config) else [whole, mx.concatenate(parts)]
    scores = [torch.tensor(each.tolist()).log_softmax(-1) for each in found]
    return max(float((each - expected).abs().max()) for each in scores)


def _keeps_old_keys(config: Any) -> bool:
    """With a cache, `dynamic` keeps the rotation of earlier keys: in transformers too."""
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "dynamic"


def _randomized(model: Any) -> Any:
    """Random weights, large enough that each part of the model matters."""
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "A_log" not in name:
            parameter.data.normal_(0, 0.5 if "embed" in name else 0.12)
        elif "A_log" not in name and not name.endswith("dt_bias"):
            parameter.data.add_(torch.randn_like(parameter) * 0.15)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            buffer.normal_(0, 0.3)
    return model
