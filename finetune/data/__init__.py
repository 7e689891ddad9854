"""Turn examples into token ids and labels.

The package reads, renders, encodes, audits, packs and caches the training data.
"""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.data.audit import Report as Report
    from finetune.data.preparation import Prepared as Prepared
    from finetune.data.preparation import prepare as prepare
    from finetune.data.streaming import stream as stream

__all__ = ["Prepared", "Report", "prepare", "stream"]

__getattr__ = lazy_imports(
    __name__,
    {
        "Prepared": "preparation.Prepared",
        "prepare": "preparation.prepare",
        "stream": "streaming.stream",
        "Report": "audit.Report",
    },
)
