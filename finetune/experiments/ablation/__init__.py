"""`finetune ablate`: measure each optimization alone and in combination."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.experiments.ablation.ablation import run as ablate

__all__ = ["ablate"]

__getattr__ = lazy_imports(__name__, {"ablate": "ablation.run"})
