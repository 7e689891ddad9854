"""Rotary embeddings of the types `dynamic` and `longrope`, whose frequencies depend on the longest sequence.

transformers chooses them by the longest sequence of a batch (`modeling_rope_utils.dynamic_rope_update`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig

    from finetune.core.model_config import ModelConfig

ORIGINAL = "original_inv_freq"


def batch_limit(config: PreTrainedConfig | ModelConfig) -> int | None:
    """Return the length, in tokens, beyond which a sequence changes the frequencies of its whole batch.

    `None`: the model has other rotary embeddings.
    """
    text = config.get_text_config()
    return min(_limits(getattr(text, "rope_parameters", None), text), default=None)


def _limits(rope: object, text: Any) -> Iterator[int]:
    """Yield the limit of each kind of layer."""
    if not isinstance(rope, dict):
        return
    kind = rope.get("rope_type", rope.get("type"))
    limits = {
        "dynamic": getattr(text, "max_position_embeddings", None),
        "longrope": rope.get("original_max_position_embeddings"),
    }
    if isinstance(limit := limits.get(str(kind)), int):
        yield limit
    for inner in rope.values():
        yield from _limits(inner, text)


def forget_longest(model: nn.Module) -> None:
    """Let `dynamic` embeddings depend on the current batch alone.

    transformers keeps the frequencies of the longest sequence so far. So an evaluation would change the
    training, and a resumed run would not be the run without a stop.
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
