"""The model families that finetune writes as GGUF: what llama.cpp calls their settings and tensors.

llama.cpp reads each fact here (its `convert_hf_to_gguf.py` and `src/models/`). Export stops
with an error that names each value that llama.cpp would ignore or compute differently.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.core.errors import Problem, UserError
from finetune.models import token_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig

SLIDING_EVERY = {"gemma2": 2, "gemma3_text": 6}
"""llama.cpp's pattern: every n-th layer attends to all tokens, the layers before it to a window."""


WITH_BIASES = {"llama", "granite"}  # model types for which llama.cpp reads the biases of `attention_bias`


class Family(NamedTuple):
    """How llama.cpp stores one model type of transformers."""

    architecture: str
    """The name in `general.architecture`."""
    permuted: bool = False
    """Whether the rows of the query and key weights are stored in pairs, for llama.cpp's rotation."""
    norm_offset: float = 0.0
    """What llama.cpp expects to be added to the weights of norms."""
    activation: str = "silu"


FAMILIES = {
    "llama": Family("llama", permuted=True),
    "mistral": Family("llama", permuted=True),
    "mixtral": Family("llama", permuted=True),
    "smollm3": Family("smollm3", permuted=True),
    "granite": Family("granite", permuted=True),
    "qwen2": Family("qwen2"),
    "qwen2_moe": Family("qwen2moe"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "olmo2": Family("olmo2"),
    "olmoe": Family("olmoe"),
    "phi3": Family("phi3"),
    "gemma": Family("gemma", norm_offset=1.0, activation="gelu_pytorch_tanh"),
    "gemma2": Family("gemma2", norm_offset=1.0, activation="gelu_pytorch_tanh"),
    "gemma3_text": Family("gemma3", norm_offset=1.0, activation="gelu_pytorch_tanh"),
}


class GgufTensor(NamedTuple):
    """A tensor of the GGUF file, and how it is computed from tensors of the checkpoint."""

    name: str
    sources: tuple[str, ...]
    compute: Callable[[list[torch.Tensor]], torch.Tensor]


def load_gguf() -> Any:
    """Return the package gguf, which is an optional dependency."""
    return importlib.import_module("gguf")


def tensor_names(config: ModelConfig, family: Family) -> Any:
    """Return gguf's table from the names of a checkpoint's tensors to llama.cpp's names."""
    gguf = load_gguf()
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family.architecture]
    return gguf.get_tensor_name_map(architecture, config.num_hidden_layers)


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a text model.

    Raises:
        UserError: llama.cpp or finetune lacks the family or a feature of the model (exit 2).
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            Problem(
                "finetune can't write this model family as GGUF",
                found=f"model_type: {config.model_type}",
                expected=", ".join(sorted(FAMILIES)),
                fix="--to vllm",
                code="export",
            )
        )
    lacks = [text for text, holds in unsupported(config, family).items() if holds]
    if lacks:
        raise UserError(
            *(
                Problem(
                    f"GGUF export does not support {text}",
                    found=f"model_type: {config.model_type}",
                    fix="--to vllm",
                    why="llama.cpp would ignore it or compute it differently",
                    code="export",
                )
                for text in lacks
            )
        )
    return family


def unsupported(config: ModelConfig, family: Family) -> dict[str, bool]:
    """Return each feature that llama.cpp lacks for a family, and whether the config uses it."""
    kind, heads = config.model_type, config.num_attention_heads
    rope = rope_of(config)
    scaling = {"default", "linear", "yarn"} | {"llama": {"llama3"}, "granite": {"llama3"}}.get(
        family.architecture, set()
    )
    scaling |= {"longrope"} if kind == "phi3" else set()
    head = head_size(config)
    window = getattr(config, "sliding_window", None)
    uses_window = bool(window) and getattr(config, "use_sliding_window", True) is not False
    partial = float(rope.get("partial_rotary_factor") or 1.0)
    betas = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    found = {
        f"the activation {activation_of(config)}": activation_of(config) != family.activation,
        f"rope scaling of type {rope['rope_type']}": rope["rope_type"] not in scaling,
        "yarn with truncate: false": rope["rope_type"] == "yarn" and not rope.get("truncate", True),
        "yarn with another factor of the attention": not _usual_attention_factor(rope),
        "yarn with another beta_fast or beta_slow": rope["rope_type"] == "yarn" and betas != (32.0, 1.0),
        "tied embeddings": kind in ("olmo2", "olmoe", "qwen2_moe") and config.tie_word_embeddings,
        "partial rotary embeddings": partial != 1.0 and kind != "phi3",
        "a sliding window": uses_window
        and kind not in SLIDING_EVERY
        and window < config.max_position_embeddings,
        "an output head with its own weights": kind in ("gemma", "gemma2") and not config.tie_word_embeddings,
        "a head size other than hidden_size / heads": kind == "granite"
        and head * heads != config.hidden_size,
    }
    biases = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    found[f"{' and '.join(biases)}: true"] = bool(biases) and kind not in WITH_BIASES
    if kind == "gemma2":
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        found["null as softcapping of logits"] = not all(getattr(config, key, None) for key in caps)
    if kind == "gemma3_text":
        sliding = rope_of(config, "sliding_attention")["rope_type"]
        found["rope scaling of the layers with a sliding window"] = sliding != "default"
    if kind in SLIDING_EVERY:
        every = SLIDING_EVERY[kind]
        wanted = ["sliding_attention"] * (every - 1) + ["full_attention"]
        layers = list(getattr(config, "layer_types", None) or [])
        expected = [wanted[index % every] for index in range(config.num_hidden_layers)]
        found["this order of sliding and full attention layers"] = layers != expected
        scale = getattr(config, "query_pre_attn_scalar", head)
        found[f"query_pre_attn_scalar {scale}"] = scale != head
        found["bidirectional attention"] = bool(getattr(config, "use_bidirectional_attention", False))
    if kind in ("qwen2_moe", "qwen3_moe"):
        found["layers without experts"] = bool(config.mlp_only_layers) or config.decoder_sparse_step != 1
    if kind in ("qwen2_moe", "qwen3_moe", "olmoe"):
        wanted = kind == "qwen3_moe"
        found[f"norm_topk_prob: {config.norm_topk_prob}"] = bool(config.norm_topk_prob) is not wanted
    if kind == "olmoe":
        found["clipped queries and keys"] = getattr(config, "clip_qkv", None) is not None
        found["fewer key heads than query heads"] = config.num_key_value_heads != heads
    if kind == "smollm3":
        wanted = [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]
        found["this order of layers without rotary embeddings"] = list(config.no_rope_layers) != wanted
    return found


def _usual_attention_factor(rope: dict[str, Any]) -> bool:
    """Return whether transformers multiplies cosines and sines as llama.cpp does: by 0.1 ln(factor) + 1."""
    if rope["rope_type"] != "yarn":
        return True
    logarithm, scales = 0.1 * math.log(rope["factor"]), [rope.get("mscale"), rope.get("mscale_all_dim")]
    own = [1 + scale * max(0.0, logarithm) for scale in scales if scale]
    usual = own[0] / own[1] if len(own) == 2 else 1 + max(0.0, logarithm)
    given = rope.get("attention_factor")
    return math.isclose(1 + logarithm, usual if given is None else given, rel_tol=1e-6)


def activation_of(config: ModelConfig) -> str:
    """Return the activation of the MLP. Gemma's configs name it `hidden_activation`."""
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def head_size(config: ModelConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rope_of(config: ModelConfig, kind: str = "full_attention") -> dict[str, Any]:
    """Return the rotary settings of a kind of layer."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in rope or "sliding_attention" in rope:
        rope = dict(rope.get(kind) or {})
    rope.setdefault("rope_type", "default")
    return rope


def settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the model's settings under llama.cpp's keys."""
    head, rope = head_size(config), rope_of(config)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": int(head * float(rope.get("partial_rotary_factor") or 1.0)),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": config.vocab_size,
        **(rope_scaling(config, rope) | expert_settings(config) | own_settings(config)),
    }
    return {f"{family.architecture}.{key}": value for key, value in found.items()}


def rope_scaling(config: ModelConfig, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of rope scaling. Llama 3's scaling is a tensor: `rope_tensors`."""
    if rope["rope_type"] == "longrope":
        length = int(rope["original_max_position_embeddings"])
        scale = config.max_position_embeddings / length
        factor = rope.get("attention_factor")
        if factor is None:
            factor = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 else 1.0
        return {"rope.scaling.original_context_length": length, "rope.scaling.attn_factor": float(factor)}
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    found: dict[str, Any] = {
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": float(rope["factor"]),
    }
    if rope["rope_type"] == "yarn":
        length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        found["rope.scaling.original_context_length"] = int(length)
        betas = [name for name in ("beta_fast", "beta_slow") if rope.get(name)]
        found |= {f"rope.scaling.yarn_{name}": float(rope[name]) for name in betas}
    return found


def notes(config: ModelConfig) -> list[str]:
    """Return in which context sizes llama.cpp computes a model in another way.

    For longrope, llama.cpp chooses the short or the long factors by the size of the context. transformers
    chooses by the length of the text. Both agree in a short context.
    """
    short = token_limits.batch_limit(config)
    if short is None:
        return []
    return [
        f"rope scaling longrope: the commands set a context of {short:,} tokens. In a larger context, "
        "llama.cpp takes the long factors for short texts too, and transformers the short ones"
    ]


def expert_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a mixture of experts."""
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not experts:
        return {}
    found = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    named = {
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return found | {name: getattr(config, key) for key, name in named.items() if getattr(config, key, None)}


def own_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the keys that only one family has."""
    if config.model_type == "granite":
        names = {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        }
        return {key: float(getattr(config, name)) for key, name in names.items()}
    if config.model_type == "phi3":
        return {"attention.sliding_window": 0}  # llama.cpp reads 0 as no window
    if config.model_type not in SLIDING_EVERY:
        return {}
    found: dict[str, Any] = {"attention.sliding_window": config.sliding_window}
    if config.model_type == "gemma3_text":
        found["rope.freq_base_swa"] = float(rope_of(config, "sliding_attention").get("rope_theta", 10000.0))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if value := getattr(config, key, None):
            found[key] = float(value)
    return found


def rope_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors that hold a rope scaling: Llama 3's divisors, or the factors of longrope."""
    rope, head = rope_of(config), head_size(config)
    if rope["rope_type"] == "longrope":
        factors = {"long": rope["long_factor"], "short": rope["short_factor"]}
        return {f"rope_factors_{name}.weight": torch.tensor(value).float() for name, value in factors.items()}
    if rope["rope_type"] != "llama3":
        return {}
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    length, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    frequencies = float(rope["rope_theta"]) ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
    wavelengths = 2 * math.pi / frequencies
    smooth = ((length / wavelengths - low) / (high - low)).clamp(0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).float()}


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head: llama.cpp rotates neighbors, transformers the two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)
