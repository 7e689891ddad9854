"""Translate the configs of other tools into recipes: axolotl, LLaMA-Factory and TRL."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.importers.reading import import_recipe as import_recipe

__all__ = ["import_recipe"]

__getattr__ = lazy_imports(__name__, {"import_recipe": "reading.import_recipe"})
