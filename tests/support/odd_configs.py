"""Values of a config.json that the model class reads only when it is built, or in its forward pass."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_FACTORS = {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}
ROPES: tuple[Any, ...] = (
    _LLAMA3, {"rope_type": "llama3", "factor": 8.0}, {"rope_type": "none", "factor": 2.0}, {"type": "none"},
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear"}, {"type": "linear", "factor": "2"},
    {"rope_type": "linear", "factor": None}, {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "yarn"},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
    {"rope_type": "longrope"}, {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    {"rope_type": "longrope", **_FACTORS, "factor": 2.0}, {"rope_type": "su", **_FACTORS},
    {"rope_type": "mrope", "mrope_section": [2, 1, 1]}, {"rope_type": 5}, "yarn", {}, {"factor": 2.0},
    {"rope_type": "default", "rope_theta": "x"}, {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "none"}, "sliding_attention": {"rope_type": "default"}},
)  # fmt: skip
VALUES: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("rope_scaling", "rope_parameters"): ROPES,
    ("hidden_act", "hidden_activation", "activation_function"): ("none", "gelu_new", "swiglu", None, 5),
    ("layer_types",): (
        ["none"] * 2, ["full_attention"], ["full_attention", "none"], ["sliding_attention"] * 2, [],
        ["full_attention"] * 3, ["linear_attention", "full_attention"], "full_attention", [1, 2], 5,
    ),
    ("attn_implementation", "_attn_implementation", "experts_implementation"): ("none",),
    ("pad_token_id",): (500, -1, "0", [0]),
    ("eos_token_id", "bos_token_id"): (1, "1", [1]),
    ("torch_dtype", "dtype"): ("none", "float16"),
    ("head_dim", "num_attention_heads", "num_key_value_heads", "hidden_size"): (3, 7, 9, 33),
    ("num_experts_per_tok", "num_experts", "num_local_experts"): (1, 9),
    ("attention_dropout", "attn_pdrop", "resid_pdrop", "hidden_dropout"): (0, 0.1, 2.0, "0"),
    ("rms_norm_eps", "layer_norm_epsilon", "initializer_range"): (1e-5, "1e-6", None),
    ("tie_word_embeddings", "use_cache", "return_dict", "scale_attn_weights", "norm_topk_prob"): (
        False, "yes", 1, None,
    ),
    ("sliding_window", "max_window_layers", "no_rope_layers", "mlp_only_layers"): (4, "x", None, [1], [1, 0]),
    ("id2label", "task_specific_params", "cache_implementation", "unsloth_version"): (5, "x", {}),
    ("embedding_multiplier", "attention_multiplier", "clip_qkv", "query_pre_attn_scalar"): (2.0, "x", None),
}  # fmt: skip


class OddValue(NamedTuple):
    key: str
    value: Any


ODD_VALUES = [
    OddValue(key, v) for keys, values in VALUES.items() for key, v in itertools.product(keys, values)
]


def with_odd_value(raw: dict[str, Any], odd: OddValue) -> dict[str, Any]:
    """A config.json with one odd value; old files have `rope_scaling` in place of `rope_parameters`."""
    left = {"rope_parameters"} if odd.key == "rope_scaling" else set[str]()
    return {**{key: value for key, value in raw.items() if key not in left}, odd.key: odd.value}
