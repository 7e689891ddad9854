"""Runs in fresh processes and their figures, shared by comparison, ablation and sweep."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.experiments.runner.measured_run import RunCommand as RunCommand
    from finetune.experiments.runner.worker_process import Evaluation as Evaluation

__all__ = ["Evaluation", "RunCommand"]

__getattr__ = lazy_imports(
    __name__, {"RunCommand": "measured_run.RunCommand", "Evaluation": "worker_process.Evaluation"}
)
