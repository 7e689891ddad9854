"""Apply the regular expressions of a task file to model answers, with a time limit for each match.

Python's `re` cannot be stopped, and `(a+)+$` takes hours on a long answer. The package `regex`, which
transformers requires, has a timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from finetune.core.errors import Problem, UserError

SECONDS = 2.0


class LimitedPattern:
    """A pattern with the methods that lm-eval's filters and finetune's tasks call."""

    def __init__(self, pattern: str) -> None:
        import regex

        self.pattern = pattern
        self._compiled = regex.compile(pattern)

    def findall(self, text: str) -> list[Any]:
        return self._limited(self._compiled.findall, text)

    def search(self, text: str) -> Any:
        return self._limited(self._compiled.search, text)

    def remove(self, text: str) -> str:
        return self._limited(lambda said, timeout: self._compiled.sub("", said, timeout=timeout), text)

    def _limited(self, match: Callable[..., Any], text: str) -> Any:
        try:
            return match(text, timeout=SECONDS)
        except TimeoutError:
            raise UserError(
                Problem(
                    f"the regular expression needs more than {SECONDS:g} s for one answer",
                    "eval.tasks",
                    found=self.pattern[:200],
                    fix="rewrite the pattern without nested repeats such as (a+)+",
                    code="eval-task",
                )
            ) from None


def problems(pattern: str, key: str, where: str) -> list[Problem]:
    """Return a problem if a pattern is not a valid regular expression."""
    import regex

    try:
        regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError, MemoryError) as error:
        return [
            Problem(
                "the pattern is not a valid regular expression",
                key,
                where=where,
                found=pattern[:200],
                why=str(error) or type(error).__name__,
                fix="correct the pattern",
                code="eval-task",
            )
        ]
    return []
