"""Decide whether a shipped module list may be used for a config.

Transformers reads many values only when it builds the model, such as `hidden_act` or the type of
`rope_parameters`. So the list is used only if all values are usual. For other configs, finetune builds the
model on the meta device. Transformers then refuses a wrong value as it does in a run.
"""

from __future__ import annotations

import math
from typing import Any

from finetune.core.model_config import ModelConfig

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("float32", "float16", "bfloat16")
LAYER_TYPES = ("full_attention", "sliding_attention")
# The values that each type of rotary embeddings needs
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Other checks read these keys, or no model reads them
_NOT_READ = (
    "_name_or_path", "architectures", "quantization_config", "task_specific_params", "transformers_version",
)  # fmt: skip
# transformers reads this key when it builds a model, for `generate`
_CACHES = (
    None, "dynamic", "hybrid", "hybrid_chunked", "offloaded", "offloaded_static", "paged", "quantized",
    "sliding_window", "static",
)  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MISSING = object()


def is_usual(raw: dict[str, Any], config: ModelConfig, family: dict[str, Any]) -> bool:
    """Return whether the model class of a family certainly accepts all values of a config.json.

    Args:
        raw: the content of config.json.
        config: the same content, completed by `architecture.as_config`.
        family: the shipped list, with the defaults of the config class.
    """
    layers, words, defaults = config.num_hidden_layers, config.vocab_size, family["defaults"]
    defaults = {**defaults, "rope_scaling": defaults.get("rope_parameters", _MISSING)}  # the old name
    return _sizes_agree(config) and all(
        has_no_effect(key, value, words) or _is_usual(key, value, defaults.get(key, _MISSING), layers)
        for key, value in raw.items()
        if key not in ("auto_map", "model_type")
    )


def has_no_effect(key: str, value: object, words: int) -> bool:
    """Return whether a value of config.json changes no module and is valid for every model.

    Args:
        words: the size of the vocabulary.
    """
    if key in _NOT_READ:
        return True
    if key in ("dtype", "torch_dtype"):
        return value is None or value in DTYPES
    if key == "use_cache":
        return isinstance(value, bool)
    if key == "cache_implementation":
        return isinstance(value, str | None) and value in _CACHES
    if key not in _TOKENS:
        return False
    if key == "eos_token_id" and isinstance(value, list):
        return all(type(one) is int for one in value)
    return value is None or (type(value) is int and (key != "pad_token_id" or -1 <= value < words))


def _sizes_agree(config: ModelConfig) -> bool:
    """Return whether the sizes of a config are divisible by its attention heads and experts."""
    heads, width = config.num_attention_heads, config.hidden_size
    groups = getattr(config, "num_key_value_heads", None)
    head_width = getattr(config, "head_dim", None)
    experts, chosen = (getattr(config, key, None) for key in ("num_experts", "num_experts_per_tok"))
    experts = experts or getattr(config, "num_local_experts", None)
    return (
        heads > 0
        and (width % heads == 0)
        and (groups is None or (groups > 0 and heads % groups == 0))
        and (head_width or width // heads) % 2 == 0
        and (not chosen or not experts or chosen <= experts)
    )


def _is_usual(key: str, value: object, default: object, layers: int) -> bool:
    if type(value) is type(default) and value == default:
        return True
    if key in _TOKENS:  # `has_no_effect` knows the usual ones
        return False
    if key in ("rope_scaling", "rope_parameters"):
        return value is None or (default is not _MISSING and _is_usual_rope(value))
    if isinstance(value, list):
        of_layers = key in ("layer_types", "no_rope_layers") and len(value) == layers
        return default is not _MISSING and of_layers and all(one in (0, 1, *LAYER_TYPES) for one in value)
    if isinstance(value, str):
        return key.startswith(("hidden_act", "activation")) and value in ACTIVATIONS
    if default is None or default is _MISSING or (key == "sliding_window" and value is None):
        return value is None or isinstance(value, bool) or _is_size(key, value)
    if isinstance(default, bool):
        return isinstance(value, bool)
    fits = type(value) is type(default) or (value == 0 and key.endswith(("dropout", "pdrop")))
    return isinstance(default, int | float) and fits and _is_size(key, value)


def _is_size(key: str, value: object) -> bool:
    most = 1 if key.endswith(("dropout", "pdrop")) else math.inf
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _is_usual_rope(value: object) -> bool:
    """Return whether transformers can build rotary embeddings from this section of a config."""
    if not isinstance(value, dict):
        return False
    if value and all(key in LAYER_TYPES for key in value):
        return all(one is None or _is_usual_rope(one) for one in value.values())
    numbers = {key: one for key, one in value.items() if key not in ("rope_type", "type")}
    kind = value.get("rope_type", value.get("type", "default"))
    needed = ROPE_TYPES.get(kind) if isinstance(kind, str) else None
    return (
        needed is not None
        and set(needed) <= numbers.keys()
        and all(type(one) in (int, float) and one > 0 for one in numbers.values())
    )
