"""Export a run: merged and quantized weights, model card, and upload to the Hub."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.export.merging import run as merge
    from finetune.export.publishing import run as publish

__all__ = ["merge", "publish"]

__getattr__ = lazy_imports(__name__, {"merge": "merging.run", "publish": "publishing.run"})
