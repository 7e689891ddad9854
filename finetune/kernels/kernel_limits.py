"""Requirements of the kernels for attention, fp8 and experts. This module does not import torch."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.core.model_config import ModelConfig

# Names that finetune registers with transformers for kernels without a mask (attention_functions.py). In each
# layer, transformers' own flash_attention_* wait for the device to get the borders of the examples, which
# breaks the compiled graph. Without the package, they download a kernel from the Hub.
IMPLEMENTATIONS = {
    "flash_attention_4": "finetune_fa4",
    "flash_attention_3": "finetune_fa3",
    "flash_attention_2": "finetune_fa2",
    "cudnn": "finetune_cudnn",
    "varlen": "finetune_varlen",
}
# flash-attention: distribution (2 and 4 share an import name) and the extra that installs it, if any
FLASH = {
    "flash_attention_2": ("flash-attn", "flash"),
    "flash_attention_3": ("flash-attn-3", ""),
    "flash_attention_4": ("flash-attn-4", "kernels"),
}
FLASH_MODULES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute.interface",
}
# Lowest compute capability; the largest head size forward and backward
LIMITS = {
    "flash_attention_4": ((9, 0), 256),
    "flash_attention_3": ((9, 0), 256),
    "flash_attention_2": ((8, 0), 256),
    "cudnn": ((8, 0), 128),
    "varlen": ((8, 0), 256),
}

# cuDNN needs 0.1 to 0.3 s on an H100 for each new length of a batch (benchmarks/LOG.md). Padding to a
# multiple of 64 tokens limits the number of lengths.
LENGTH_MULTIPLES = {"cudnn": 64}

FP8_CAPABILITY = (8, 9)  # the first GPUs with fp8 GEMMs: Ada, then Hopper
FP8_MULTIPLE = 16  # fp8 GEMMs need both dimensions of a weight to be a multiple of this
FP8_WIDTH = 2048  # smallest hidden size for which `auto` uses fp8
# GPUs that multiply fp8 experts as they are. The tiles were chosen on Hopper; other GPUs with fp8 have less
# shared memory, or were not measured.
FP8_EXPERTS_CAPABILITY = (9, 0)

# Largest rank of an adapter on experts.
MAX_EXPERTS_RANK = 128
# Activations of fused MLPs and experts, by their names in a config.
FUSED_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Weights of stacked experts, as transformers names them.
STACKED = ("gate_up_proj", "down_proj")
# Families whose experts have a gate function of their own, another weight layout or a norm
# (transformers 5.22: `_apply_gate` and the arguments of `use_experts_implementation`).
OTHER_EXPERTS = (
    "aria_text", "beam", "deepseek_v4", "glm5_next", "gpt_oss", "hy_v4", "minimax_m3_vl_text", "muse_spark",
    "openai_privacy_filter", "llama4_text", "longcat_flash", "step3p5",
)  # fmt: skip
# Those of them whose quantized experts train without an adapter (speed.frozen_experts).
FROZEN_EXPERTS = ("deepseek_v4", "gpt_oss")
# A quantized stack of experts: the weights of a 4-bit block, and the divisor of a row's length, because a
# word holds 8 weights of 4 bits.
EXPERTS_BLOCK, EXPERTS_ROW = 64, 8
# Values of `model.quantization` that also quantize stacked experts.
EXPERTS_STORAGES = ("nf4", "fp4", "fp8", "int8")
# Those whose GEMMs can run in fp8. The error of int8 is a tenth of that of fp8.
FP8_EXPERTS_STORAGES = ("nf4", "fp4", "fp8")


def experts_unsupported_reason(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why stacked experts can't run by `speed.fused_experts`; the empty string if they can.

    Args:
        shapes: of the model's parameters by their names.
    """
    text = config.get_text_config()
    holders = {
        name.rpartition(".")[0] for name, size in shapes.items() if name.endswith(STACKED) and len(size) == 3
    }
    if not holders:
        return "the model has no stacked experts"
    others = [n for n in shapes if n.rpartition(".")[0] in holders and n.rpartition(".")[2] not in STACKED]
    if others or text.model_type in OTHER_EXPERTS:
        return f"the experts of {text.model_type} have their own forward pass"
    act = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
    if act is None:
        return f"the activation of {text.model_type}'s experts is not known"
    return "" if act in FUSED_ACTIVATIONS else f"the experts' activation is {act}"


def quantized_experts_unsupported_reason(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return why a base model does not quantize its stacked experts; the empty string if it does.

    Args:
        config: the config of the checkpoint.
        shapes: the shapes of the model's parameters, by name.
    """
    if getattr(config, "quantization_config", None) and not stored_as_mxfp4(config):
        return "the checkpoint is quantized already, and holds the experts as they are"
    return quantizing_unsupported_reason(config, shapes)


def fp8_experts_unsupported_reason(
    storage: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return why the GEMMs of stacked experts can't run in fp8; the empty string if they can.

    Args:
        storage: `model.quantization`; empty for `auto` and `none`.
        shapes: the shapes of the model's parameters, by name.
    """
    if storage not in FP8_EXPERTS_STORAGES:
        return "model.quantization is not fp8, nf4 or fp4"
    if reason := quantized_experts_unsupported_reason(config, shapes):
        return reason
    if config.get_text_config().model_type in FROZEN_EXPERTS:
        return f"the experts of {config.get_text_config().model_type} have their own gate"
    sizes = {size[1:] for name, size in shapes.items() if name.endswith(STACKED) and len(size) == 3}
    if any(outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE for outputs, inputs in sizes):
        return f"a size of the experts is no multiple of {FP8_MULTIPLE}"
    if storage != "fp8" and any(inputs % EXPERTS_BLOCK for _, inputs in sizes):
        return f"the experts' rows are no multiples of {EXPERTS_BLOCK}, the weights of a 4-bit block"
    return ""


def stored_as_mxfp4(config: ModelConfig) -> bool:
    """Return whether a checkpoint is a gpt-oss with experts in mxfp4, which a quantized base model keeps."""
    if config.get_text_config().model_type != "gpt_oss":  # the family that transformers reads in mxfp4
        return False
    declared: Any = getattr(config, "quantization_config", None)
    declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
    return isinstance(declared, dict) and declared.get("quant_method") == "mxfp4"


def quantizing_unsupported_reason(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return why stacked experts with 16-bit weights can't be quantized; the empty string if they can."""
    if config.get_text_config().model_type in FROZEN_EXPERTS:
        return stacks_unsupported_reason(shapes)
    return experts_unsupported_reason(config, shapes) or stacks_unsupported_reason(shapes)


def stacks_unsupported_reason(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return why stacks of these shapes can't be quantized; the empty string if they can."""
    sizes = [size for name, size in shapes.items() if name.endswith(STACKED) and len(size) == 3]
    if not sizes:
        return "the model has no stacked experts"
    if any(size[2] % EXPERTS_ROW or prod(size) % EXPERTS_BLOCK for size in sizes):
        return f"the experts' rows are not multiples of {EXPERTS_ROW}, or their sizes not of {EXPERTS_BLOCK}"
    return ""
