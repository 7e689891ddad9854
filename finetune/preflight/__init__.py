"""`finetune check`: find every mistake before a weight is loaded."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.preflight.checker import check_without_examples as check
    from finetune.preflight.choice_checks import setup_of as setup_of

__all__ = ["check", "setup_of"]

__getattr__ = lazy_imports(
    __name__, {"check": "checker.check_without_examples", "setup_of": "choice_checks.setup_of"}
)
