"""The weights of families of decoders by their config's numbers, named as transformers names them."""

from __future__ import annotations

from typing import Any

from finetune import modules

Shapes = dict[str, tuple[int, ...]]

# Decoders of Llama's layers: q, k, v, o; gate, up, down. Norms of a layer
BEFORE = ("input_layernorm", "post_attention_layernorm")
AROUND = (*BEFORE, "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "granite"), BEFORE),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": AROUND,
    "gemma3_text": AROUND,
}
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")  # in the place of gate, up and down
JOINED = ("phi3",)  # Llama's, with q, k and v in one product, gate and up in one
MOE = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
BIASED = {"qwen2": ("q_proj", "k_proj", "v_proj"), "qwen2_moe": ("q_proj", "k_proj", "v_proj")}
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")  # a norm of one head for queries, one for keys
WIDE_NORMS = ("olmo2", "olmoe")  # a norm of all queries, one of all keys


def of(config: Any) -> Shapes | None:
    """The weights of a decoder; `None` if its family is not known here.

    Args:
        config: of the text model.
    """
    family = config.model_type
    if family == "gpt_neox":
        return _as_gpt_neox(config)
    plain = not getattr(config, "mlp_only_layers", None) and getattr(config, "decoder_sparse_step", 1) == 1
    if family in EXPERTS and not plain:
        return None
    return _as_llama(config) if family in (*NORMS, *EXPERTS, *JOINED) else None


def experts(config: Any) -> int:
    """Of a layer of a text model, which transformers holds as tensors of three dimensions; 0: it has none."""
    return max(int(getattr(config, key, None) or 0) for key in MOE)


def _as_llama(config: Any) -> Shapes:
    """Of Llama's layers, with experts or without."""
    family, hidden, wide = config.model_type, config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * size
    linear = {
        "self_attn.q_proj": (heads * size, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, heads * size),
    }  # fmt: skip
    if family not in EXPERTS:
        linear |= _mlp("mlp", wide, hidden)
    elif shared := getattr(config, "shared_expert_intermediate_size", None):
        linear |= {**_mlp("mlp.shared_expert", shared, hidden), "mlp.shared_expert_gate": (1, hidden)}
    if family in JOINED:
        joined = {
            "self_attn.qkv_proj": (heads * size + 2 * keys, hidden),
            "mlp.gate_up_proj": (2 * wide, hidden),
        }
        linear = {**joined, **{name: linear[name] for name in ("self_attn.o_proj", "mlp.down_proj")}}
    layer: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    for name, (outputs, _) in linear.items():
        kind = "attention_bias" if "self_attn" in name else "mlp_bias"
        if getattr(config, kind, False) or modules.short(name) in BIASED.get(family, ()):
            layer[f"{name}.bias"] = (outputs,)
    layer |= {f"{name}.weight": (hidden,) for name in NORMS.get(family, BEFORE)}
    if family in HEAD_NORMS:
        layer |= {f"self_attn.{name}_norm.weight": (size,) for name in ("q", "k")}
    if family in WIDE_NORMS:
        layer |= {"self_attn.q_norm.weight": (heads * size,), "self_attn.k_norm.weight": (keys,)}
    if family in EXPERTS:
        number, wide = experts(config), getattr(config, "moe_intermediate_size", None) or wide
        layer["mlp.gate.weight"] = (number, hidden)
        layer["mlp.experts.gate_up_proj"] = (number, 2 * wide, hidden)
        layer["mlp.experts.down_proj"] = (number, hidden, wide)
    ends: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return _whole(config, "model.layers", layer, ends)


def _mlp(name: str, wide: int, hidden: int) -> dict[str, tuple[int, int]]:
    up = {f"{name}.{kind}_proj": (wide, hidden) for kind in ("gate", "up")}
    return {**up, f"{name}.down_proj": (hidden, wide)}


def _as_gpt_neox(config: Any) -> Shapes:
    """Of GPT-NeoX's: queries, keys and values in one product, everything with a bias."""
    hidden, wide = config.hidden_size, config.intermediate_size
    linear = {
        "mlp.dense_h_to_4h": (wide, hidden), "mlp.dense_4h_to_h": (hidden, wide),
        "attention.query_key_value": (3 * hidden, hidden), "attention.dense": (hidden, hidden),
    }  # fmt: skip
    layer: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    biased = {name for name in linear if "attention" not in name or getattr(config, "attention_bias", True)}
    layer |= {f"{name}.bias": (linear[name][0],) for name in biased}
    both = [(name, kind) for name in BEFORE for kind in ("weight", "bias")]
    layer |= {f"{name}.{kind}": (hidden,) for name, kind in both}
    ends: Shapes = {"gpt_neox.embed_in.weight": (config.vocab_size, hidden)}
    ends |= {f"gpt_neox.final_layer_norm.{kind}": (hidden,) for kind in ("weight", "bias")}
    return _whole(config, "gpt_neox.layers", layer, ends)


def _whole(config: Any, where: str, layer: Shapes, ends: Shapes) -> Shapes:
    """All layers, what is outside of them, and the head where it is not the embeddings."""
    head = {} if config.tie_word_embeddings else {"lm_head.weight": (config.vocab_size, config.hidden_size)}
    layers = range(config.num_hidden_layers)
    return {
        **ends,
        **{f"{where}.{index}.{name}": size for index in layers for name, size in layer.items()},
        **head,
    }
