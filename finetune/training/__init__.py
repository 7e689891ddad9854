"""The pipeline from recipe to saved adapter, the Trainer and its callbacks."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.training.pipeline import run as train
    from finetune.training.trainer import Trainer as Trainer

__all__ = ["Trainer", "train"]

__getattr__ = lazy_imports(__name__, {"train": "pipeline.run", "Trainer": "trainer.Trainer"})
