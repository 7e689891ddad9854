"""Rotary embeddings of the type `dynamic`, whose frequencies depend on the longest sequence so far."""

from __future__ import annotations

from typing import Any

from torch import nn

ORIGINAL = "original_inv_freq"


def forget_longest(model: nn.Module) -> None:
    """Let `dynamic` embeddings depend on the current batch alone.

    transformers keeps the frequencies of the longest sequence (`modeling_rope_utils.dynamic_rope_update`). So
    an evaluation would change the training, and a resumed run would not be the run without a stop.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if "dynamic" in kinds and hasattr(module, "original_max_seq_len"):
            module.register_forward_pre_hook(_reset)


def _reset(module: Any, _: object) -> None:
    """Set the frequencies and the longest length of all kinds of layers as at the start."""
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name.endswith(ORIGINAL):
            prefix = name.removesuffix(ORIGINAL)
            module.register_buffer(f"{prefix}inv_freq", buffer.clone(), persistent=False)
    for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
        setattr(module, name, module.original_max_seq_len)
