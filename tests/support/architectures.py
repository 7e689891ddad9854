"""Tiny two-layer configs of transformers' decoders, by model family."""

from __future__ import annotations

from typing import Any

_TOKENS = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_PLAIN = {**_TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, **_HEADS}
_NO_GROUPS = {key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}
_WIDE = {**_PLAIN, "head_dim": 8}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL_EXPERTS = {**_EXPERTS, "moe_intermediate_size": 16}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_INDEXED = {**_LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA_2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_STATE = {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "expand": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "qwen2", "phi", "phi3", "olmo", "olmo2", "olmo3", "granite", "starcoder2",
            "stablelm", "cohere", "nemotron", "smollm3", "arcee", "diffllama",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        ("qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "cohere2", "exaone4", "ernie4_5", "helium",
         "seed_oss", "hunyuan_v1_dense"),
        _WIDE,
    ),
    "gemma3n_text": {
        **_WIDE, "num_hidden_layers": 5, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
        "laurel_rank": 4, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 5,
    },
    **dict.fromkeys(("gpt_neox", "persimmon"), _NO_GROUPS),
    **dict.fromkeys(("gpt2", "openai-gpt"), _GPT),
    **{key: {**_GPT, "rotary_dim": 8, "n_ctx": 128} for key in ("gptj", "codegen")},
    **{key: {**_PLAIN, **_LOCAL} for key in ("mixtral", "granitemoe", "phimoe")},
    **{key: {**_PLAIN, **_LATENT} for key in ("deepseek_v2", "deepseek_v3")},
    **{key: {**_WIDE, **_ROUTED} for key in ("glm4_moe", "dots1")},
    "gpt_bigcode": {**_GPT, "n_inner": 64},
    "ctrl": {**_GPT, "dff": 64},
    "gpt_neo": {
        **_TOKENS, "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 4,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128,
    },
    "opt": {
        **_TOKENS, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 128, "word_embed_proj_dim": 32,
    },
    "bloom": {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "mpt": {**_TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "xglm": {
        **_TOKENS, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4,
        "max_position_embeddings": 128,
    },
    "biogpt": _NO_GROUPS,
    "olmoe": {**_PLAIN, **_EXPERTS},
    "qwen2_moe": {**_PLAIN, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**_WIDE, **_SMALL_EXPERTS},
    "gpt_oss": {**_WIDE, **_LOCAL},
    "mamba": {**_STATE, "state_size": 4},
    "falcon_mamba": {**_STATE, "state_size": 4},
    "mamba2": {**_STATE, "state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "jamba": {
        **_PLAIN, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_expand": 2, "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "bamba": {
        **_PLAIN, **_MAMBA_2, "attn_layer_indices": [1],
    },
    "recurrent_gemma": {
        **_WIDE, "lru_width": 32, "attention_window_size": 64, "block_types": ["recurrent", "attention"],
    },
    "rwkv": {
        **_TOKENS, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2,
        "context_length": 128,
    },
    "lfm2": {**_PLAIN, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "qwen3_next": {
        **_WIDE, **_SMALL_EXPERTS, **_LINEAR_ATTENTION, "shared_expert_intermediate_size": 16,
    },
    "qwen3_5_text": {**_WIDE, **_LINEAR_ATTENTION},
    "minimax": {**_WIDE, **_LOCAL, "block_size": 8},
    **{key: {**_PLAIN, **_INDEXED} for key in ("deepseek_v32", "glm_moe_dsa")},
    **{key: {**_PLAIN, **_LATENT} for key in ("glm4_moe_lite", "minicpm3")},
    "deepseek_v4": {
        **_PLAIN, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_layer_types": ["moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention"], "o_groups": 2, "o_lora_rank": 8,
        "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4, "sliding_window": 16, "qk_rope_head_dim": 8,
        "partial_rotary_factor": 0.5, "hc_mult": 2,
    },
    "dbrx": {
        **_TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "kimi_linear": {
        **_PLAIN, **_LATENT, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4, "linear_head_dim": 8,
    },
    "granitemoehybrid": {
        **_PLAIN, **_LOCAL, **_MAMBA_2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "falcon_h1": {**_PLAIN, **_MAMBA_2, "mamba_d_ssm": 64},
    "lfm2_moe": {
        **_PLAIN, **_SMALL_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    },
    "longcat_flash": {
        **_PLAIN, **_LATENT, "ffn_hidden_size": 64, "head_dim": 8, "moe_topk": 2, "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
    },
    **dict.fromkeys(("jetmoe", "olmo_hybrid", "modernbert-decoder", "trocr", "xlstm"), _WIDE),
    "zamba": {  # two layers share the weights of their attention
        **_PLAIN, "num_hidden_layers": 5, "num_key_value_heads": 4, "attn_layer_period": 2,
        "attn_layer_offset": 0, "mamba_d_state": 4,
    },
    "zamba2": {
        **_PLAIN, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 8, "adapter_rank": 4,
    },
    "nemotron_h": {
        **_WIDE, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 8,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16,
    },
    "minimax_m2": {**_WIDE, **_LOCAL},
    "hrm_text": {**_WIDE, "num_hidden_layers": 1},
}  # fmt: skip

_TEXT = {**_WIDE, "tie_word_embeddings": False}
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {"depth": 1, "num_heads": 2, "patch_size": 14, "hidden_size": 32}
_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}


def _wrapper(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "text_config": {**_TEXT, **text},
        "vision_config": {**_VISION, **vision},
        "tie_word_embeddings": False,
        **more,
    }


# Multimodal models, whose text model finetune trains
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": _wrapper({}, {}, mm_tokens_per_image=4),
    "llava": _wrapper({"model_type": "llama"}, {"model_type": "clip_vision_model"}, image_token_index=96),
    "llava_onevision": _wrapper(
        {"model_type": "qwen2"},
        {"model_type": "siglip_vision_model"},
        image_token_index=96,
        video_token_index=95,
    ),
    "mistral3": _wrapper({"model_type": "mistral"}, {"model_type": "pixtral"}, image_token_index=96),
    "qwen2_vl": _wrapper(_POSITIONS, {**_QWEN_VISION, "embed_dim": 32}),
    "qwen3_vl": _wrapper(
        _POSITIONS, {**_QWEN_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    ),
    "internvl": _wrapper(
        {"model_type": "qwen2"}, {"image_size": [28, 28], "patch_size": [14, 14]}, image_token_id=96
    ),
    "idefics3": _wrapper({"model_type": "llama"}, {}, image_token_id=96),
    "lfm2_vl": _wrapper(
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        {"num_patches": 16},
        image_token_id=96,
    ),
}


def config_of(family: str) -> Any:
    """The config of a family; `llama tied`: with a head that has the embeddings' weight."""
    from transformers import AutoConfig

    name, _, tied = family.partition(" ")
    options = {**CONFIGS, **MULTIMODAL}[name]
    return AutoConfig.for_model(name, **{**options, "tie_word_embeddings": True} if tied else options)
