"""Errors, console, strict YAML and JSON, run checks, and the refusal of code in model files."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.core.console import Console as Console
    from finetune.core.errors import Exit as Exit
    from finetune.core.errors import Problem as Problem
    from finetune.core.errors import UserError as UserError
    from finetune.core.run_checks import Choice as Choice
    from finetune.core.run_checks import RunChecks as RunChecks
    from finetune.core.untrusted_files import check_files as check_files

__all__ = ["Choice", "Console", "Exit", "Problem", "RunChecks", "UserError", "check_files"]

__getattr__ = lazy_imports(
    __name__,
    {
        "Exit": "errors.Exit",
        "Problem": "errors.Problem",
        "UserError": "errors.UserError",
        "Choice": "run_checks.Choice",
        "RunChecks": "run_checks.RunChecks",
        "Console": "console.Console",
        "check_files": "untrusted_files.check_files",
    },
)
