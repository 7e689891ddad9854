"""The model families of mlx-lm: the values of a config that it reads, and their names.

Each fact here was measured with mlx-lm 0.32: tiny models with one unusual value each, whose log-probabilities
were compared with transformers'. Export stops with an error that names each value that mlx-lm would ignore or
compute differently.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError
from finetune.export import gguf_families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.core.model_config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT, LONGROPE = ("default",), ("default", "longrope")
UNSCALED_LONG = ("default", "linear", "dynamic", "llama3", "yarn")
ALL = (*UNSCALED_LONG, "longrope")
SILU = ("silu", "swish")
GELU = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh")
"""mlx-lm has a single function for each family. In tiny models, log-probabilities differ by up to 0.004."""

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
NO_BIAS, WITH_BIAS = {"attention_bias": False}, {"attention_bias": True}
CAUSAL = {"use_bidirectional_attention": False}
ROUTED = {"topk_method": "noaux_tc"}

MULTIPLIED = {
    "attention_bias": "attention_out_multiplier",
    "mlp_bias": "mlp_multipliers",
    "mamba_proj_bias": "ssm_multipliers",
    "projectors_bias": "ssm_out_multiplier",
}
"""Biases of Falcon H1, and the multipliers that mlx-lm applies to their weights only."""


class Family(NamedTuple):
    """What mlx-lm reads of the config of one model type of transformers."""

    ropes: tuple[str, ...] = DEFAULT
    """The types of rotary embeddings that mlx-lm computes as transformers does."""
    activations: tuple[str, ...] = SILU
    window: bool = False
    """Whether mlx-lm has the sliding window of this model type."""
    head_dim: bool = True
    """Whether the size of a head may differ from hidden_size / heads."""
    fixed: Mapping[str, Any] = {}
    """The value of each key that mlx-lm can only compute with this value. A missing key has it."""


FAMILIES = {
    "cohere": Family(head_dim=False, fixed=TIED | {"layer_norm_bias": False}),
    "cohere2": Family(window=True, head_dim=False, fixed=TIED | {"layer_norm_bias": False}),
    "deepseek_v2": Family(("yarn",), fixed=UNTIED | {"mlp_bias": False, "moe_layer_freq": 1}),
    "deepseek_v3": Family(
        UNSCALED_LONG, fixed=UNTIED | ROUTED | {"moe_layer_freq": 1, "rope_interleave": True}
    ),
    "ernie4_5": Family(),
    "exaone4": Family(ALL, window=True),
    "falcon_h1": Family(
        ALL,
        fixed={
            "attention_in_multiplier": 1.0,
            "key_multiplier": 1.0,
            "time_step_limit": [0.0, math.inf],
        },
    ),
    "gemma": Family(activations=GELU, fixed=TIED | NO_BIAS | CAUSAL),
    "gemma2": Family(activations=GELU, fixed=TIED | NO_BIAS),
    "gemma3_text": Family(ALL, GELU, window=True, fixed=NO_BIAS | CAUSAL | {"final_logit_softcapping": None}),
    "glm": Family(),
    "glm4": Family(fixed=UNTIED),
    "glm4_moe": Family(fixed=UNTIED | ROUTED),
    "gpt_neox": Family(activations=GELU, head_dim=False, fixed=UNTIED | WITH_BIAS),
    "granite": Family(ALL, head_dim=False),
    "granitemoe": Family(ALL, head_dim=False),
    "helium": Family(fixed=UNTIED),
    "llama": Family(ALL),
    "mamba": Family(fixed={"layer_norm_epsilon": 1e-5}),
    "mamba2": Family(fixed={"layer_norm_epsilon": 1e-5}),
    "mistral": Family(ALL),
    "mixtral": Family(head_dim=False),
    "nemotron": Family(("default", "linear"), ("relu2",)),
    "olmo2": Family(ALL),
    "olmo3": Family(ALL, window=True),
    "olmoe": Family(ALL, fixed={"clip_qkv": None}),
    "phi": Family(activations=GELU, head_dim=False, fixed=UNTIED | {"qk_layernorm": False}),
    "phi3": Family(LONGROPE, head_dim=False),
    "phimoe": Family(
        LONGROPE,
        head_dim=False,
        fixed=UNTIED | WITH_BIAS | {"lm_head_bias": True, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(ALL, head_dim=False),
    "qwen2_moe": Family(
        head_dim=False,
        fixed=UNTIED
        | {"qkv_bias": True, "norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "qwen3": Family(ALL, fixed=NO_BIAS),
    "qwen3_moe": Family(fixed=NO_BIAS),
    "qwen3_next": Family(ALL),
    "seed_oss": Family(ALL),
    "smollm3": Family(ALL, window=True),
    "stablelm": Family(fixed=UNTIED),
    "starcoder2": Family(activations=GELU, head_dim=False, fixed={"use_bias": True}),
}
"""Model types that mlx-lm opens from the files that finetune writes. It opens mistral as llama."""

MULTIMODAL = {"gemma3": ("gemma3_text",), "llava": ("llama", "mistral"), "mistral3": ("llama", "mistral")}
"""Multimodal model types of mlx-lm, and the text models that it has in them."""


def check(config: ModelConfig) -> None:
    """Raise a UserError if mlx-lm lacks the family or a feature of the model (exit 2)."""
    text = config.get_text_config()
    kind = text.model_type
    if kind not in FAMILIES or (text is not config and kind not in MULTIMODAL.get(config.model_type, ())):
        raise UserError(
            Problem(
                "mlx-lm does not have this model family",
                found=f"model_type: {config.model_type}" + (f" with {kind}" if text is not config else ""),
                expected=", ".join(FAMILIES),
                fix="--to vllm",
                code="export",
            )
        )
    features = [feature for feature, used in unsupported(text, _is_tied(config)).items() if used]
    if features:
        raise UserError(
            *(
                Problem(
                    f"MLX export does not support {feature}",
                    found=f"model_type: {kind}",
                    fix="--to vllm",
                    why="mlx-lm would ignore it or compute it differently",
                    code="export",
                )
                for feature in features
            )
        )


def unsupported(config: ModelConfig, tied: bool | None = None) -> dict[str, bool]:
    """Return each feature that mlx-lm lacks for a family, and whether the config uses it.

    Args:
        config: the config of the text model.
        tied: whether the output head is tied to the embeddings. `None` means what `config` says.
    """
    kind, family = config.model_type, FAMILIES[config.model_type]
    activation = gguf_families.activation_of(config)
    found = {f"the activation {activation}": activation not in family.activations}
    for key, wanted in family.fixed.items():
        value = getattr(config, key, wanted)
        value = tied if key == "tie_word_embeddings" and tied is not None else value
        value = list(value) if isinstance(value, tuple) else value
        found[f"{key}: {value}"] = bool(value or wanted) and value != wanted
    heads, head = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    own_size = bool(heads and head and head != config.hidden_size // heads)
    found[f"head_dim: {head} with {heads} heads"] = own_size and not family.head_dim
    found["a sliding window"] = _has_window(config) and not family.window and kind != "gemma2"
    return found | _rope(config, family) | _layers(config) | _own(config)


def _has_window(config: ModelConfig) -> bool:
    """Return whether a layer attends to fewer tokens than the model's longest text has."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    unused = getattr(config, "use_sliding_window", True) is False or (layers and SLIDING not in layers)
    return bool(window) and not unused and window < config.max_position_embeddings


def _rope(config: ModelConfig, family: Family) -> dict[str, bool]:
    """Return the features of rotary embeddings that mlx-lm lacks."""
    if not getattr(config, "rope_parameters", None):
        return {}
    rope = _rope_of(config)
    kind, partial = rope["rope_type"], rope.get("partial_rotary_factor")
    found = {
        f"rope scaling of type {kind}": kind not in family.ropes,
        "partial rotary embeddings": config.model_type == "glm" and partial not in (None, 1.0),
        "yarn with truncate: false": kind == "yarn" and not rope.get("truncate", True),
        "yarn with another factor of the attention": kind == "yarn" and not _same_yarn_factor(rope),
        "longrope with other factors for short texts": kind == "longrope"
        and (
            rope["short_factor"] != rope["long_factor"] or rope.get("short_mscale") != rope.get("long_mscale")
        ),
        "longrope with another factor of the attention": kind == "longrope"
        and config.model_type != "phimoe"
        and not _same_longrope_factor(config, rope),
    }
    if config.model_type in ("gemma3_text", "olmo3"):
        sliding = _rope_of(config, SLIDING)
        found["rope scaling of the layers with a sliding window"] = sliding["rope_type"] != "default"
        other = sliding.get("rope_theta") != rope.get("rope_theta")
        found["two values of rope_theta"] = other and config.model_type == "olmo3"
    return found


def _rope_of(config: ModelConfig, layers: str = FULL) -> dict[str, Any]:
    return {key: value for key, value in gguf_families.rope_of(config, layers).items() if value is not None}


def _same_yarn_factor(rope: dict[str, Any]) -> bool:
    """Return whether mlx-lm multiplies cosines and sines by the same factor as transformers."""
    logarithm = 0.1 * math.log(max(1.0, rope["factor"]))
    scale, divisor = rope.get("mscale"), rope.get("mscale_all_dim")
    usual = (1 + scale * logarithm) / (1 + divisor * logarithm) if scale and divisor else 1 + logarithm
    computed = (1 + rope.get("mscale", 1) * logarithm) / (1 + rope.get("mscale_all_dim", 0) * logarithm)
    return math.isclose(computed, rope.get("attention_factor", usual), rel_tol=1e-6)


def _same_longrope_factor(config: ModelConfig, rope: dict[str, Any]) -> bool:
    """Return whether mlx-lm multiplies cosines and sines by the same factor as transformers."""
    length = rope["original_max_position_embeddings"]
    ratio = config.max_position_embeddings / length
    computed, usual = (
        math.sqrt(1 + math.log(max(1.0, factor)) / math.log(length))
        for factor in (ratio, rope.get("factor", ratio))
    )
    return math.isclose(computed, rope.get("attention_factor", usual), rel_tol=1e-6)


def _layers(config: ModelConfig) -> dict[str, bool]:
    """Return whether mlx-lm lacks the order of the model's layers."""
    kind, layers = config.model_type, list(getattr(config, "layer_types", None) or [])
    if kind in ("llama", "mistral"):  # mlx-lm reads this key, transformers does not
        lacks = SLIDING in layers
    elif kind in ("cohere2", "gemma3_text", "qwen3_next"):
        every = layers.index(FULL) + 1 if FULL in layers else 0
        lacks = not every or [(index + 1) % every == 0 for index in range(len(layers))] != [
            layer == FULL for layer in layers
        ]
    elif kind == "olmo3" or (kind == "exaone4" and config.sliding_window):
        lacks = not {FULL, SLIDING} <= set(layers)
    else:
        lacks = kind == "smollm3" and FULL not in layers
    return {"this order of sliding and full attention layers": lacks}


def _own(config: ModelConfig) -> dict[str, bool]:
    """Return the features that mlx-lm lacks for one family only."""
    kind = config.model_type
    if kind == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return {"null as softcapping of logits": not all(getattr(config, key, None) for key in caps)}
    if kind == "gpt_neox":
        size = config.intermediate_size
        return {f"intermediate_size: {size}, not 4 * hidden_size": size != 4 * config.hidden_size}
    if kind in ("deepseek_v3", "glm4_moe"):
        one = config.norm_topk_prob and config.num_experts_per_tok == 1
        return {"norm_topk_prob: True with one expert per token": bool(one)}
    if kind == "falcon_h1":
        found = {"mamba_rms_norm with groups": bool(config.mamba_rms_norm) and config.mamba_n_groups > 1}
        return found | {
            f"{bias} with {key}": bool(getattr(config, bias)) and not _is_one(getattr(config, key))
            for bias, key in MULTIPLIED.items()
        }
    return {}


def _is_one(multipliers: float | list[float]) -> bool:
    return all(one == 1 for one in (multipliers if isinstance(multipliers, list | tuple) else [multipliers]))


def names(config: ModelConfig) -> dict[str, Any]:
    """Return values of config.json that mlx-lm reads. transformers 5 omits them or uses other names."""
    text = config.get_text_config()
    if text is not config:
        inner = text.to_dict() | _text_names(text, _is_tied(config))
        return {"vocab_size": text.vocab_size, "text_config": inner}
    return _text_names(config, _is_tied(config))


def _is_tied(config: ModelConfig) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _text_names(config: ModelConfig, tied: bool) -> dict[str, Any]:
    kind, found = config.model_type, {"tie_word_embeddings": tied, **_rope_names(config)}
    heads = getattr(config, "num_attention_heads", None)
    if heads and getattr(config, "head_dim", None) is None:
        found["head_dim"] = config.hidden_size // heads
    if kind == "mamba2":
        found["intermediate_size"] = config.num_heads * config.head_dim
    if kind == "qwen3_moe":
        found["num_experts"] = config.num_local_experts
    return found | _layer_names(config)


def _rope_names(config: ModelConfig) -> dict[str, Any]:
    """Return the settings of rotary embeddings at the places where transformers 4 wrote them."""
    if not getattr(config, "rope_parameters", None):
        return {}
    kind, rope = config.model_type, _rope_of(config)
    theta, partial = rope.pop("rope_theta", None), rope.get("partial_rotary_factor")
    values = {"rope_theta": theta, "partial_rotary_factor": partial}
    if kind == "gpt_neox":
        values |= {"rotary_emb_base": theta, "rotary_pct": 1.0 if partial is None else partial}
    if kind == "gemma3_text":
        values["rope_local_base_freq"] = _rope_of(config, SLIDING).get("rope_theta")
    if rope["rope_type"] == "longrope":
        values["original_max_position_embeddings"] = rope.get("original_max_position_embeddings")
    found = {key: value for key, value in values.items() if value is not None}
    scaled = rope["rope_type"] != "default"
    return found | {"rope_scaling": rope | {"type": rope["rope_type"]} if scaled else None}


def _layer_names(config: ModelConfig) -> dict[str, Any]:
    """Return the order of the layers. transformers 5 writes the type of each layer."""
    kind, layers = config.model_type, list(getattr(config, "layer_types", None) or [])
    if kind == "exaone4":
        letters = "".join("L" if layer == SLIDING else "G" for layer in layers)
        return {"sliding_window_pattern": letters if config.sliding_window else None}
    if kind in ("cohere2", "gemma3_text", "qwen3_next") and FULL in layers:
        name = "full_attention_interval" if kind == "qwen3_next" else "sliding_window_pattern"
        return {name: layers.index(FULL) + 1}
    return {}
