"""Trace one training step, and show where the time goes and what to change."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.profiling.profiler import Profile as Profile
    from finetune.profiling.recommendations import judge as judge

__all__ = ["Profile", "judge"]

__getattr__ = lazy_imports(__name__, {"Profile": "profiler.Profile", "judge": "recommendations.judge"})
