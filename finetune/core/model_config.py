"""The type of a model's config, and the sizes of its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PreTrainedConfig

# Transformers' own, or what `models/architecture.py` reads of a config.json without an import of torch
ModelConfig: TypeAlias = "PreTrainedConfig | SimpleNamespace"

# Names of the number of experts per layer, and of the number of experts per token
EXPERTS_OF_A_LAYER = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k",
)  # fmt: skip
# Names of the intermediate size of an expert, of all shared experts together, and of their number.
# The first value that a config has counts
EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


class ExpertSizes(NamedTuple):
    """The experts of one layer."""

    number: int
    each: int
    """Experts of a token, without shared experts."""
    width: int
    """Intermediate size of an expert."""
    shared: int
    """Intermediate size of all shared experts together."""

    @property
    def active(self) -> int:
        """Intermediate values of one token in all its experts."""
        return self.each * self.width + self.shared


def expert_sizes(config: ModelConfig) -> ExpertSizes | None:
    """Return the sizes of a text model's experts; `None` without experts, or if the config lacks a size."""
    number, each = experts(config), experts_of_a_token(config)
    width = next((size for key in EXPERT_WIDTH if (size := _most(config, (key,)))), 0)
    if not (number > 1 and each and width):
        return None
    shared = _most(config, SHARED_WIDTH) or _most(config, SHARED_COUNT) * width
    return ExpertSizes(number, each, width, shared)


def experts(config: ModelConfig) -> int:
    """Return the number of experts per layer of a text model; 0 without experts."""
    return _most(config, EXPERTS_OF_A_LAYER)


def experts_of_a_token(config: ModelConfig) -> int:
    """Return the number of experts per token of a text model; 0 without experts."""
    return _most(config, EXPERTS_OF_A_TOKEN)


def _most(config: ModelConfig, keys: tuple[str, ...]) -> int:
    """Return the largest of these numbers in a config or its `ffn_config`. It may have one per layer."""
    inner = getattr(config, "ffn_config", None) or {}
    inner = inner if isinstance(inner, dict) else vars(inner)
    values = [getattr(config, key, None) or inner.get(key) or 0 for key in keys]
    return max(int(max(value) if isinstance(value, list | tuple) else value) for value in values)
