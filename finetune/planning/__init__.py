"""Estimate memory, time and cost of a run before a weight is loaded."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.planning.plan import Plan as Plan
    from finetune.planning.planner import make as plan

__all__ = ["Plan", "plan"]

__getattr__ = lazy_imports(__name__, {"Plan": "plan.Plan", "plan": "planner.make"})
