"""HTML page, plots and terminal tables of a run."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.reporting.plots import bars as bars
    from finetune.reporting.plots import curves as curves
    from finetune.reporting.plots import scatter as scatter

__all__ = ["bars", "curves", "scatter"]

__getattr__ = lazy_imports(
    __name__, {"bars": "plots.bars", "curves": "plots.curves", "scatter": "plots.scatter"}
)
