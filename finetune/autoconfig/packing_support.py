"""Whether a model can keep the examples of a packed sequence apart on this machine, by its config alone.

`finetune check` and `finetune train` ask before a weight is loaded. Before its first step, training verifies
the isolation on the model itself (`speed/packing_isolation.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.autoconfig import attention_choice, batch_size
from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig
    from finetune.recipe.schema import Data, Train

# Families whose blocks do not pass the borders to their layers (transformers 5.22)
DROPS_BORDERS = ("mamba2",)
DISTRIBUTIONS = {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm", "fla": "flash-linear-attention"}
ATTENDING = {"attention", "full_attention", "sliding_attention", "chunked_attention"}  # of `layer_types`
MASKED = ("sdpa", "eager", "flex_attention")  # attention that learns the borders from a mask


def check(config: ModelConfig, data: Data, train: Train, attention: str, processes: int = 1) -> None:
    """Refuse to pack examples for a model that can't keep them apart or whose mask is too short.

    Args:
        config: the config of the model.
        attention: the attention implementation of the run; `auto` if it is not chosen yet.
        processes: the number of processes that share the sequences of a step.

    Raises:
        UserError: the model can't keep examples apart (exit 3). Its mask is too short (exit 2).
    """
    if not data.flat:
        return
    if reason := unsupported_reason(config, attention):
        raise UserError(
            Problem(
                "this model can't separate the examples of a packed sequence",
                _keys(data)[0],
                found="true",
                why=reason,
                fix=switch_off(data) + _or_kernels(config),
                code="model-unsupported",
            ),
            code=Exit.ENVIRONMENT,
        )
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    searched = train.per_device_train_batch_size == "auto"
    rows = train.effective_batch_size if searched else batch_size.split_batch(train, processes).per_device
    if longest and rows * data.max_length > longest and upstream_options.fixed_mask(text.model_type):
        one = ["train.per_device_train_batch_size: 1"] if data.max_length <= longest else []
        raise UserError(
            Problem(
                f"the attention mask of {text.model_type} has only {longest} positions for one forward pass",
                _keys(data)[0],
                found=f"{rows} sequences of {data.max_length} tokens",
                expected=f"{longest} tokens or fewer per forward pass",
                fix=" or ".join([*one, switch_off(data)]),
                code="batch-size",
            )
        )


def switch_off(data: Data) -> str:
    """Return the change of the recipe that switches packing off."""
    return ", ".join(f"{key}: false" for key in _keys(data))


def _keys(data: Data) -> list[str]:
    return [f"data.{key}" for key in ("packing", "padding_free") if getattr(data, key)]


def _or_kernels(config: ModelConfig) -> str:
    """Return the command that installs the kernels, if the model separates examples with them."""
    text = config.get_text_config()
    missing = missing_kernels(text.model_type) if _has_other_layers(text) else []
    if not missing or crosses_borders(text.model_type):
        return ""
    how = packages.install_extra("hybrid")
    if "mamba-ssm" in missing:  # no extra has it, because flash-attn-4 excludes it
        how = packages.install_command(*missing, "--no-build-isolation")
    return f"; or, on a machine with an NVIDIA GPU: {how}"


def unsupported_reason(config: ModelConfig, attention: str) -> str:
    """Return why a model can't keep packed examples apart, or an empty string."""
    text = config.get_text_config()
    family = text.model_type
    if _has_other_layers(text):
        if crosses_borders(family):
            return f"the layers of {family} carry a state from one example to the next"
        if missing := missing_kernels(family):
            several = "packages" if len(missing) > 1 else "package"
            return f"the layers of {family} need the {several} {' and '.join(missing)} to separate examples"
    by_mask = attention in MASKED or (attention == "auto" and family not in attention_choice.FAMILIES)
    if by_mask and upstream_options.masks_without_positions(family):
        return f"the attention mask that transformers makes for {family} does not separate examples"
    return ""


def crosses_borders(family: str) -> bool:
    """Return whether the layers of a family carry a state across borders even with all kernels installed."""
    without = not upstream_options.kernel_packages(family) or upstream_options.kernel_without_borders(family)
    return bool(without) or family in DROPS_BORDERS


def missing_kernels(family: str) -> list[str]:
    """Return the missing packages whose kernels separate packed examples in the layers of a family."""
    needed = dict.fromkeys(upstream_options.kernel_packages(family).values())
    return [DISTRIBUTIONS.get(name, name) for name in needed if not packages.installed(name)]


def _has_other_layers(text: PreTrainedConfig) -> bool:
    """Whether some layers are convolutions, linear attention or state-space layers."""
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    if kinds:
        return bool(kinds - ATTENDING)
    stateful = upstream_options.causal_flags(text.model_type).get("_is_stateful", False)
    return stateful or bool(upstream_options.kernel_packages(text.model_type))
