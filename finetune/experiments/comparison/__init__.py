"""`finetune compare`: compare adapter types, or two runs."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.experiments.comparison.comparison import run as compare

__all__ = ["compare"]

__getattr__ = lazy_imports(__name__, {"compare": "comparison.run"})
