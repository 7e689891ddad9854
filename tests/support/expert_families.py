"""Tiny models of the families with experts: one list for tests and for the table in the documentation."""

from __future__ import annotations

from typing import Any, NamedTuple

from support.architectures import CONFIGS

_WIDE = CONFIGS["qwen3"]


class Family(NamedTuple):
    """A family of mixtures of experts."""

    name: str
    """As people call it."""
    model_type: str
    config: dict[str, Any]


_CALM = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}  # noise would differ between two passes
FAMILIES = (
    Family("Mixtral", "mixtral", CONFIGS["mixtral"] | {"router_jitter_noise": 0.0}),
    Family("Qwen2-MoE", "qwen2_moe", CONFIGS["qwen2_moe"]),
    Family("Qwen3-MoE", "qwen3_moe", CONFIGS["qwen3_moe"] | {"mlp_only_layers": [0]}),
    Family("Qwen3-Next", "qwen3_next", CONFIGS["qwen3_next"]),
    Family(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        {key: value for key, value in CONFIGS["qwen3_next"].items() if key != "intermediate_size"},
    ),
    Family("OLMoE", "olmoe", CONFIGS["olmoe"]),
    Family("GraniteMoE", "granitemoe", CONFIGS["granitemoe"]),
    Family("PhiMoE", "phimoe", CONFIGS["phimoe"] | _CALM),
    Family("DeepSeek-V3", "deepseek_v3", CONFIGS["deepseek_v3"]),
    Family("GLM-4-MoE", "glm4_moe", CONFIGS["glm4_moe"]),
    Family("gpt-oss", "gpt_oss", CONFIGS["gpt_oss"]),
    Family(
        "Llama 4 (text)",
        "llama4_text",
        _WIDE
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64, "moe_layers": [1]},
    ),
    Family("Jamba", "jamba", CONFIGS["jamba"]),
)
BY_TYPE = {one.model_type: one for one in FAMILIES}
SAMPLE = ("qwen3_moe", "deepseek_v3", "gpt_oss")  # `make test` runs these; `make soak` runs the others


def config_of(model_type: str, **more: Any) -> Any:
    """The config of a family."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **BY_TYPE[model_type].config | more)
