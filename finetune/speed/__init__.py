"""Fused adapters, chunked loss, activation checkpointing and offloading, and compilation.

None of them changes what the model computes.
"""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.speed.apply_to_model import apply as apply
    from finetune.speed.apply_to_model import decoder_layers as decoder_layers

__all__ = ["apply", "decoder_layers"]

__getattr__ = lazy_imports(
    __name__, {"apply": "apply_to_model.apply", "decoder_layers": "apply_to_model.decoder_layers"}
)
