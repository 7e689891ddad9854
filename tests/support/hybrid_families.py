"""Tiny models of the families with Mamba, convolutions, linear attention or RWKV layers."""

from __future__ import annotations

from typing import Any, NamedTuple

from support.architectures import CONFIGS


class Family(NamedTuple):
    """A family with layers that carry a state from token to token."""

    skipped: tuple[str, ...] = ()
    """The last names of the linear layers that `all-linear` skips for LoRA."""
    kernels: tuple[str, ...] | None = None
    """The packages whose kernels separate packed examples; `None`: no kernel of transformers does."""


_GATED_DELTA = Family(kernels=("causal-conv1d", "flash-linear-attention"))
_MAMBA_2 = ("causal-conv1d", "mamba-ssm")
FAMILIES = {
    "mamba": Family(("dt_proj", "out_proj")),
    "falcon_mamba": Family(("dt_proj", "out_proj")),
    "mamba2": Family(("out_proj",)),
    "jamba": Family(("dt_proj",)),
    "zamba": Family(),
    "zamba2": Family(("gate_up_proj_adapter_list",), _MAMBA_2),
    "bamba": Family(kernels=_MAMBA_2),
    "granitemoehybrid": Family(kernels=_MAMBA_2),
    "falcon_h1": Family(("out_proj",), _MAMBA_2),
    "nemotron_h": Family(("out_proj",), _MAMBA_2),
    "lfm2": Family(kernels=("causal-conv1d",)),
    "lfm2_moe": Family(kernels=("causal-conv1d",)),
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "olmo_hybrid": _GATED_DELTA,
    "kimi_linear": _GATED_DELTA,
    "minimax": Family(),
    "recurrent_gemma": Family(),
    "rwkv": Family(),
}
SAMPLE = ("mamba", "jamba", "zamba2", "qwen3_next")  # `make test` runs these; `make soak` runs the others


def config_of(family: str, **more: Any) -> Any:
    """The config of a family."""
    from transformers import AutoConfig

    options = CONFIGS.get(family)
    if options is None:  # Qwen3.5-MoE has the sizes of Qwen3-Next
        options = {key: value for key, value in CONFIGS["qwen3_next"].items() if key != "intermediate_size"}
    return AutoConfig.for_model(family, **options | more)
