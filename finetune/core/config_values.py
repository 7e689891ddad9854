"""The sizes and classes that a model's config names: no model is built of values that none has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from finetune.core.errors import Problem

LAYERS, PARTS, WIDTH, VOCABULARY, POSITIONS = 1000, 2**14, 2**24, 2**26, 2**32
MOST_KEYS = 25_000  # of an object such as id2label, which transformers copies often
MOST_TOKENS = 1000  # of a list such as eos_token_id, which each step of an answer is compared with
# The most that a size may be, by the last words of its name; the first that fits holds
_MOST = (
    ("layers", LAYERS),
    ("n_layer", LAYERS),
    ("heads", PARTS),
    ("n_head", PARTS),
    ("experts", PARTS),
    ("num_labels", MOST_KEYS),
    ("vocab_size", VOCABULARY),
    ("hidden_size", WIDTH),
    ("intermediate_size", WIDTH),
    ("state_size", WIDTH),
    ("dim", WIDTH),
    ("rank", WIDTH),
    ("d_model", WIDTH),
    ("d_ff", WIDTH),
    ("d_kv", WIDTH),
    ("n_embd", WIDTH),
    ("n_inner", WIDTH),
    ("n_positions", POSITIONS),
    ("position_embeddings", POSITIONS),
)
# Sizes that are at least 1; others may be 0, where a model lacks the part
_POSITIVE = frozenset(
    {
        "hidden_size", "d_model", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head",
        "vocab_size",
    }
)  # fmt: skip
# Numbers above 0, by the last words of their names. 0 makes NaN of every loss
LARGEST_BITS = 1000  # of an integer; a float has up to 1024
_ABOVE_ZERO = ("_eps", "_epsilon", "rope_theta", "rotary_emb_base")
# One number in every config; heads and layers may be given for each part of a model
_ONE_NUMBER = frozenset({"vocab_size", "hidden_size", "max_position_embeddings", "n_positions"})
# Sections that transformers reads as the config of the text model
_SECTIONS = frozenset({"decoder", "generator", "text_config", "text_encoder"})
# Attributes of transformers' config classes that a file can replace, and that hold an object or names
_OBJECTS = _SECTIONS | {
    "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan", "sub_configs",
    "sub_configs_defaults", "per_layer_config",
}  # fmt: skip
_NAMES = frozenset({"architectures", "ignore_keys_at_rope_validation", "keys_to_ignore_at_inference"})
# Keys that change what a model of transformers returns, or with which it can't be saved, and whether finetune
# needs them to be set
_FIXED = {
    "return_dict": True, "fusion_config": False, "distributed_config": False, "_auto_class": False,
    "output_attentions": False, "_output_attentions": False,
}  # fmt: skip
# Methods and fixed properties of transformers' PreTrainedConfig: a key of this name would take their place
MEMBERS = frozenset(
    {
        "_check_received_keys", "_decode_special_floats", "_dict_from_json_file", "_encode_special_floats",
        "_get_config_dict", "_get_files_timestamps", "_get_generation_parameters",
        "_getattr_without_heterogeneous_validation", "_hasattr_without_heterogeneous_validation",
        "_iter_config_keys_with_heterogeneous_adjustment", "_remove_keys_not_serialized",
        "_update_heterogeneous_to_dict_output", "_upload_modified_files", "_validate_axial_rope_parameters",
        "_validate_default_rope_parameters", "_validate_dynamic_rope_parameters",
        "_validate_linear_rope_parameters", "_validate_llama3_rope_parameters",
        "_validate_longrope_rope_parameters", "_validate_proportional_rope_parameters",
        "_validate_yarn_rope_parameters", "attribute_map", "convert_rope_params_to_dict",
        "default_config_fields", "dict_dtype_to_str", "from_dict", "from_json_file", "from_pretrained",
        "get_config_dict", "get_mtp_config", "get_text_config", "is_custom_code", "is_heterogeneous",
        "is_remote_code", "nested_rope_parameter_keys", "per_layer_attributes", "push_to_hub",
        "register_for_auto_class", "save_pretrained", "standardize_rope_params", "to_dict", "to_diff_dict",
        "to_json_file", "to_json_string", "update", "update_from_string", "use_return_dict", "validate",
        "validate_architecture", "validate_layer_type", "validate_output_attentions", "validate_rope",
        "validate_token_ids",
    }
)  # fmt: skip


FIX = "correct this value in the file, or download the model again: hf download MODEL --local-dir FOLDER"


def _decoded(value: Any) -> Any:
    """Return a number that transformers writes as {"__float__": "NaN"}, or the value itself."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        try:
            return float(value["__float__"])
        except (ValueError, TypeError):
            return value
    return value


def problems(entries: Iterable[tuple[str, Any]], path: str, key: str) -> Iterator[Problem]:
    """Keys of a config whose value has another type, or is a size that is negative, zero or too large."""
    for name, given in entries:
        value = _decoded(given)
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            yield Problem(
                "an object of the model's config has too many keys",
                key,
                where=path,
                found=f"{name}: {len(value):,} keys",
                expected=f"at most {MOST_KEYS:,}",
                fix="remove the keys that the model does not need",
                code="model-config",
            )
            continue
        if bool(value) != _FIXED.get(name, bool(value)):
            yield Problem(
                "finetune does not support a value of the model's config",
                key,
                where=path,
                found=f"{name}: {value!r}"[:200],
                fix=f"remove {name} from the file",
                code="model-config",
            )
            continue
        if expected := _other_type(name, value):
            yield Problem(
                "a value of the model's config has the wrong type",
                key,
                where=path,
                found=f"{name}: {value!r}"[:200],
                expected=expected,
                fix=FIX,
                why="transformers would build another model, or fail later",
                code="model-config",
            )
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        above_zero = name == "factor" or name.endswith(_ABOVE_ZERO)  # the factor of rotary embeddings
        too_large = isinstance(value, int) and value.bit_length() > LARGEST_BITS
        if too_large or math.isnan(value) or (above_zero and not 0 < value < math.inf):
            yield Problem(
                "a value of the model's config is too large"
                if too_large
                else "a value of the model's config is not a positive number",
                key,
                where=path,
                found=f"{name}: {value}"[:100],
                fix=FIX,
                why="the losses would be NaN, or the model would fail later",
                code="model-config",
            )
        most = next((most for end, most in _MOST if f"_{name}".endswith(f"_{end}")), None)
        if most is None:
            continue
        least = int(name in _POSITIVE)
        if not least <= value <= most:
            yield Problem(
                "the model's config has a size that no model has",
                key,
                where=path,
                found=f"{name}: {value}"[:200],
                expected=f"from {least:,} to {most:,}",
                fix=FIX,
                why="such a size fills the memory, or is a typing error",
                code="model-config",
            )


def members(content: dict[str, Any], path: str, key: str) -> Iterator[Problem]:
    """Keys of a config, or of a model's config in it, that replace a method of transformers' class."""
    parts = (value for name, value in content.items() if name.endswith("_config") or name in _SECTIONS)
    for part in (content, *parts):
        for name in part if isinstance(part, dict) else ():
            if name in MEMBERS or name.startswith("__"):
                yield Problem(
                    "a key of the model's config has the name of a method",
                    key,
                    where=path,
                    found=name[:200],
                    fix=f"remove {name[:50]} from the file",
                    why="transformers would lose the method, for example when it saves the model",
                    code="model-config",
                )


def _other_type(name: str, value: object) -> str:
    """The type that a key needs, if its value has another one. Every key may be null."""
    if value is None:
        return ""
    if name in _ONE_NUMBER and type(value) not in (int, float):
        return "a number"
    if name == "model_type" and not isinstance(value, str):
        return "a string"
    if name.endswith("_token_id"):
        ids = value if isinstance(value, list) else [value]
        if len(ids) > MOST_TOKENS or not all(type(one) is int for one in ids):
            return f"an integer, or a list of at most {MOST_TOKENS:,} integers"
    if name.endswith("_implementation") and not isinstance(value, str | dict):
        return "a string"
    if name in _OBJECTS and not isinstance(value, dict):
        return "an object"
    is_names = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return "" if name not in _NAMES or is_names else "a list of strings"
