"""`finetune sweep`: an Optuna study that searches recipe values."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.experiments.sweep.search_space import Space as Space
    from finetune.experiments.sweep.study import run as sweep

__all__ = ["Space", "sweep"]

__getattr__ = lazy_imports(__name__, {"sweep": "study.run", "Space": "search_space.Space"})
