"""Compare the base model with the fine-tuned model: validation loss, generated answers, lm-eval and chat."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.evaluation.evaluator import run as evaluate
    from finetune.evaluation.verdicts import verdict as verdict

__all__ = ["evaluate", "verdict"]

__getattr__ = lazy_imports(__name__, {"evaluate": "evaluator.run", "verdict": "verdicts.verdict"})
