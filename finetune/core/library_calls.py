"""Calls of the Python API: each raises exceptions of one type, and leaves the environment as it was."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from finetune.core.errors import only_user_errors
from finetune.core.privacy import SWITCHES

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def library_call(doing: str) -> Iterator[None]:
    """Raise every exception as a `UserError`, and restore the environment at the end.

    Args:
        doing: the end of the sentence "while finetune ...", such as "merged the adapter".
    """
    before = _changeable()
    try:
        with only_user_errors(doing):
            yield
    finally:
        for name in _changeable().keys() - before:
            del os.environ[name]
        os.environ.update(before)


def _changeable() -> dict[str, str]:
    """Return the variables that finetune, Accelerate and transformers change.

    All other variables stay as they are, because another thread of the program may set them meanwhile.
    """
    changed = ("ACCELERATE_", "FSDP_", "KINETO_LOG_LEVEL", *SWITCHES)
    return {name: value for name, value in os.environ.items() if name.startswith(changed)}
