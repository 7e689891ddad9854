"""Calls of the Python API: each raises exceptions of one type, and leaves the environment as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from finetune.core import import_paths, torch_settings
from finetune.core.errors import Problem, UserError, only_user_errors
from finetune.core.privacy import SWITCHES, switch_off_telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def library_call(doing: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Let a function raise every exception as a `UserError`. Restore the environment and torch's settings.

    Args:
        doing: the end of the sentence "while finetune ...", such as "merged the adapter".
    """

    def decorated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            _check_call(function.__qualname__, signature, args, kwargs)
            with _same_environment(), torch_settings.usual(), only_user_errors(doing):
                switch_off_telemetry()  # before the function imports libraries
                import_paths.check_working_directory()
                os.environ["PYTHONSAFEPATH"] = "1"  # processes import nothing from the working directory
                return function(*args, **kwargs)

        return call

    return decorated


def _check_call(
    name: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Refuse arguments that a function does not have, and a call without the arguments that it needs."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(
            Problem(
                f"`{name}` can't be called with these arguments",
                found=str(error)[:200],
                expected=f"{name}({', '.join(map(_without_type, signature.parameters.values()))})",
                code="value-type",
            )
        ) from None


def _without_type(parameter: inspect.Parameter) -> str:
    """Return a parameter as a caller writes it: `name`, or `name=...` where the name must be given."""
    named = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    return f"{parameter.name}=..." if named else parameter.name


@contextlib.contextmanager
def _same_environment() -> Iterator[None]:
    before = _changeable()
    try:
        yield
    finally:
        for name in _changeable().keys() - before:
            del os.environ[name]
        os.environ.update(before)


def _changeable() -> dict[str, str]:
    """Return the variables that finetune, Accelerate and transformers change.

    All other variables stay as they are, because another thread of the program may set them meanwhile.
    """
    changed = ("ACCELERATE_", "FSDP_", "KINETO_LOG_LEVEL", "PYTHONSAFEPATH")
    changed += ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
    changed += ("ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC")  # `train.full_determinism` sets these five
    changed += ("FINETUNE_COMMITS", *SWITCHES)  # another call reads the newest commits
    return {name: value for name, value in os.environ.items() if name.startswith(changed)}
