"""Choose the attention implementation for a GPU, a model and its sequences, with the reason.

Training needs no mask: attention is causal, padding at the end does not contribute to the loss, and the
borders of packed documents are known. Generation pads on the left and uses a KV cache, so it needs a mask.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.autoconfig import memory_estimate
from finetune.core import packages
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.kernels import kernel_limits
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig
    from finetune.hardware.detection import Hardware

# Families whose layers pass all settings of attention to transformers' attention interface. The tests compare
# a tiny model of each family with eager attention.
FAMILIES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "smollm3", "olmo2", "granite"),
)
# TFLOP/s (forward / backward) of causal attention on an H200, with head size 128 in bf16. The first value is
# for rows of 4096 tokens, the second for packed documents of 2048 tokens (benchmarks/attention.json). The
# value of flex_attention is from benchmarks/LOG.md.
SPEED = {
    "flash_attention_4": ("587 / 502", "499 / 416"),
    "flash_attention_3": ("620 / 505", "506 / 410"),
    "cudnn": ("534 / 451", ""),
    "varlen": ("320 / 272", "292 / 239"),
    "flex_attention": ("", "266 / 270"),
}


@dataclass(frozen=True)
class Attends:
    """The properties of a model's attention, from its config. The defaults are Llama's."""

    family: str = "llama"
    head_size: int = 128
    window: int | None = None
    """Tokens in the sliding window of the layers that have one, including the token itself."""
    softcap: bool = False
    sinks: bool = False
    dropout: float = 0.0
    special: str = ""
    """A property that causal kernels do not support, such as "attends in chunks"."""
    lacks: tuple[str, ...] = ()
    """The implementations among sdpa and flex_attention that transformers' model class refuses."""


@dataclass(frozen=True)
class RowLayout:
    """The sequences that attention is trained on."""

    packed: bool
    """A row holds several documents with known borders."""
    longest: int
    """Tokens of the longest document."""
    prompts: bool = False
    """The adapter puts trained vectors before the row, as prompt tuning does."""


def read(config: PreTrainedConfig | ModelConfig) -> Attends:
    """Read the properties of a model's attention from its transformers config and model class."""
    lacks, config = _lacks(config), config.get_text_config()
    family = config.model_type
    heads = memory_estimate.largest(config, "num_attention_heads") or 1
    size = (
        memory_estimate.largest(config, "head_dim") or memory_estimate.largest(config, "hidden_size") // heads
    )
    kinds = set(getattr(config, "layer_types", None) or [])
    windows = not kinds or "sliding_attention" in kinds
    special = ""
    if getattr(config, "attention_chunk_size", None) or "chunked_attention" in kinds:
        special = "has chunked attention"
    elif kinds - {"full_attention", "sliding_attention"}:
        special = f"has layers of {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    elif getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        special = "has bidirectional attention"
    elif getattr(config, "kv_lora_rank", None):
        special = "has values and keys of different sizes"
    return Attends(
        family=family,
        head_size=size,
        window=getattr(config, "sliding_window", None) if windows else None,
        softcap=getattr(config, "attn_logit_softcapping", None) is not None,
        sinks=family in ("gpt_oss",),
        dropout=float(getattr(config, "attention_dropout", 0.0) or 0.0),
        special=special,
        lacks=lacks,
    )


def _lacks(config: ModelConfig) -> tuple[str, ...]:
    """Return the implementations that the model class refuses; none for a config without a model class."""
    flags = upstream_options.causal_flags(config.model_type)
    supports = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    return tuple(name for name, flag in supports.items() if flags and not flags.get(flag, False))


def choose(
    requested: str,
    hardware: Hardware,
    dtype: str,
    attends: Attends | None = None,
    rows: RowLayout | None = None,
) -> tuple[str, str]:
    """Choose the attention implementation. Return it with the reason.

    Args:
        requested: `model.attention`.
        dtype: the dtype of queries, keys and values: float32, bfloat16 or float16.
        attends: the properties of the model's attention; `None`: as in Llama.
        rows: the training sequences; `None`: for evaluation.

    Raises:
        UserError: this machine or this model does not support the requested implementation (exit 3).
    """
    attends = attends or Attends()
    if rows is None:
        return for_evaluation(requested, attends)
    if requested != "auto":
        reason = unsupported_reason(requested, hardware, dtype, attends, rows, installed=hardware.here)
        if reason:
            raise UserError(
                Problem(
                    f"{requested} does not run this model on this machine",
                    "model.attention",
                    found=requested,
                    why=reason,
                    fix=f"set `model.attention: {'eager' if requested in attends.lacks else 'auto'}`",
                    code="attention-kernel",
                ),
                code=Exit.ENVIRONMENT,
            )
        return requested, "asked for"
    passed_over: list[str] = []
    for name in candidates(hardware, rows):
        why_not = unsupported_reason(name, hardware, dtype, attends, rows)
        if not why_not and name in kernel_limits.IMPLEMENTATIONS and attends.family not in FAMILIES:
            why_not = f"{name} is not tested with {attends.family}"
        if not why_not:
            return name, _reason(name, hardware, rows, passed_over)
        passed_over.append(why_not)
    return _masked(attends), "auto: with a full attention mask, because " + "; ".join(passed_over)


def candidates(hardware: Hardware, rows: RowLayout) -> tuple[str, ...]:
    """Return the implementations that `auto` considers, the fastest first."""
    if hardware.device != "cuda":
        return ("sdpa", "eager")
    if rows.packed:  # not with a full mask
        return ("flash_attention_4", "flash_attention_3", "varlen", "flash_attention_2", "flex_attention")
    fast = ("flash_attention_3", "flash_attention_4", "cudnn") if hardware.capability >= (9, 0) else ()
    return (*fast, "varlen", "flash_attention_2", "sdpa", "flex_attention", "eager")


def _masked(attends: Attends) -> str:
    """Return the implementation that runs this model with a mask."""
    return "eager" if attends.softcap or attends.sinks or "sdpa" in attends.lacks else "sdpa"


def for_evaluation(requested: str, attends: Attends) -> tuple[str, str]:
    """Choose an implementation that supports left padding and a KV cache. Return it with the reason."""
    if requested == "eager":
        return "eager", "asked for"
    if attends.softcap or attends.sinks:
        return "eager", "evaluation: only eager supports a mask and this model's softcap or sinks"
    if _masked(attends) == "eager":
        return "eager", f"evaluation: transformers has no sdpa for {attends.family}"
    return "sdpa", "asked for" if requested == "sdpa" else "evaluation: supports left padding and a KV cache"


def unsupported_reason(
    name: str, hardware: Hardware, dtype: str, attends: Attends, rows: RowLayout, *, installed: bool = True
) -> str:
    """Return why an implementation can't train this model on this machine; the empty string if it can."""
    lacking = missing(name, hardware, installed=installed)
    return lacking or _wrong(name, hardware, dtype, attends, rows)


def missing(name: str, hardware: Hardware, *, installed: bool = True) -> str:
    """Return why a machine can't run an implementation; the empty string if it can.

    Args:
        installed: whether to check that the package is installed. A plan for another GPU assumes that a
            requested implementation is installed there. `auto` goes by the packages of this machine.
    """
    if name in ("eager", "sdpa"):
        return ""
    if hardware.device != "cuda":
        return f"{name} needs an NVIDIA GPU"
    if name == "flex_attention":
        return ""
    lowest, _ = kernel_limits.LIMITS[name]
    if hardware.capability < lowest:
        return f"{name} needs compute capability {lowest[0]}.{lowest[1]}, and {hardware.name} is older"
    if name == "flash_attention_3" and hardware.capability >= (10, 0):
        return f"{name} is for compute capability 9.0, and {hardware.name} is newer"
    if name == "varlen" and not packages.installed("torch.nn.attention.varlen"):
        return "the installed torch has no torch.nn.attention.varlen"
    if name not in kernel_limits.FLASH or not installed:
        return ""
    how = not_installed(name)
    return f"{name} is not installed ({how})" if how else broken(name)


def not_installed(name: str) -> str:
    """Return how to install the package of an implementation; the empty string if nothing is missing."""
    if name not in kernel_limits.FLASH or _has_flash(name):
        return ""
    extra = kernel_limits.FLASH[name][1]
    return packages.install_extra(extra) if extra else "build it from flash-attention's hopper/ folder"


@functools.cache
def broken(name: str) -> str:
    """Return why an installed FlashAttention can't be imported; the empty string if it can."""
    try:
        importlib.import_module(kernel_limits.FLASH_MODULES[name])
    except Exception as error:  # a compiled extension may raise any error, for example under another torch
        return f"{name} is installed but can't be imported ({first_line(error)})"
    return ""


def _wrong(name: str, hardware: Hardware, dtype: str, attends: Attends, rows: RowLayout) -> str:
    """Return what an implementation does not support in this model or these sequences."""
    if name == "eager":
        return ""
    if attends.softcap and name in ("sdpa", "cudnn", "varlen"):
        return f"{name} has no softcap, which {attends.family} needs"
    if attends.sinks and name != "flex_attention":
        return f"{name} has no attention sinks, which {attends.family} needs"
    if name in attends.lacks:
        return f"transformers has no {name} for {attends.family}"
    if attends.softcap and name == "flash_attention_4" and hardware.capability >= (10, 0):
        return f"{name} has a softcap only on compute capability 9.0"
    if attends.dropout and name != "sdpa":
        return f"{name} has no dropout, and the model's attention_dropout is {attends.dropout:g}"
    if name in ("sdpa", "flex_attention"):
        return ""
    if attends.special:
        return f"{attends.family} {attends.special}, which {name} does not support"
    if rows.prompts:
        return f"{name} does not support virtual tokens, which this adapter trains"
    if dtype == "float32":
        return f"{name} does not support float32"
    if name == "cudnn" and rows.packed:
        return "cudnn does not separate packed examples"
    if name == "cudnn" and attends.window is not None and attends.window < _padded(rows.longest):
        return f"cudnn has no sliding window, and {attends.family} has one of {attends.window} tokens"
    if name == "flash_attention_3" and hardware.here and (missing := left_out(dtype, attends, rows)):
        return f"this build of flash_attention_3 does not support {missing}"
    if attends.head_size % 8 or attends.head_size > _largest_head(name, hardware, attends.head_size):
        return f"{name} does not support heads of size {attends.head_size}"
    return ""


def _largest_head(name: str, hardware: Hardware, size: int) -> int:
    """Return the largest head size of an implementation on this GPU, for heads of size `size`."""
    if name == "flash_attention_4" and hardware.capability >= (10, 0):
        return 256 if size == 256 and hardware.capability < (12, 0) else 128
    return kernel_limits.LIMITS[name][1]


def _padded(longest: int) -> int:
    """Return the length to which cuDNN's attention pads a row of `longest` tokens."""
    multiple = kernel_limits.LENGTH_MULTIPLES["cudnn"]
    return math.ceil(longest / multiple) * multiple


def left_out(dtype: str, attends: Attends, rows: RowLayout) -> str:
    """Return a feature that this model or its sequences need and that FlashAttention 3 was built without.

    The `hopper/setup.py` of flash-attention records the disabled features in `flash_attn_config`.
    """
    try:
        from flash_attn_config import CONFIG  # type: ignore[reportMissingImports]  (GPU only)
    except ImportError:
        return ""
    flags = CONFIG["build_flags"].items()
    off = {flag.rpartition("DISABLE_")[2] for flag, is_off in flags if is_off}
    largest = max((size for size in (64, 96, 128, 192, 256) if f"HDIM{size}" not in off), default=0)
    missing = {
        "the backward pass": "BACKWARD" in off,
        "packed sequences": "VARLEN" in off and rows.packed,
        "float16": "FP16" in off and dtype == "float16",
        "a softcap": "SOFTCAP" in off and attends.softcap,
        "a sliding window": "LOCAL" in off and attends.window is not None and attends.window < rows.longest,
        f"heads of size {attends.head_size}": attends.head_size > largest,
    }
    return next((what for what, is_so in missing.items() if is_so), "")


def _reason(name: str, hardware: Hardware, rows: RowLayout, passed_over: list[str]) -> str:
    kind = "packed" if rows.packed else "padded"
    if hardware.device != "cuda":
        text = f"auto: the only fused kernel for {kind} sequences on the CPU"
        return f"{text} ({'; '.join(passed_over)})" if passed_over else text
    measured = SPEED.get(name, ("", ""))[rows.packed]
    text = f"auto: the fastest on this machine for {kind} sequences"
    if measured:
        text += f" ({measured} TFLOP/s forward / backward, measured on an H200)"
    if multiple := kernel_limits.LENGTH_MULTIPLES.get(name):
        text += (
            f"; {name} needs 0.1 s or more for each new length, so the default of "
            f"train.pad_to_multiple_of is {multiple}"
        )
    return f"{text}; {'; '.join(passed_over)}" if passed_over else text


def _has_flash(name: str) -> bool:
    if name == "flash_attention_3" and packages.installed("flash_attn_interface"):
        return True  # a build in place has no distribution
    try:
        return bool(importlib.metadata.version(kernel_limits.FLASH[name][0]))
    except importlib.metadata.PackageNotFoundError:
        return False
