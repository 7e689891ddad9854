"""Fused adapters, chunked loss, activation checkpointing and offloading, and compilation.

None of them changes what the model computes. `finetune.speed.apply(model)` fuses the adapters of a PEFT model
for any training loop, and `finetune.speed.remove(model)` undoes it.
"""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.speed.fused_adapters import apply as apply
    from finetune.speed.fused_adapters import remove as remove

__all__ = ["apply", "remove"]

__getattr__ = lazy_imports(__name__, {"apply": "fused_adapters.apply", "remove": "fused_adapters.remove"})
