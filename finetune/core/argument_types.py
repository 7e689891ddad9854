"""Check the arguments of the Python API before they are used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune.core.errors import Problem, UserError, first_line, nearest, raise_if_any

MOST_GPUS = 1_000_000


def check_types(**given: tuple[object, tuple[type, ...]]) -> None:
    """Refuse arguments of a wrong type. The error shows only the type, because `repr` could fail.

    Args:
        given: the value and the types of each argument, by name. A boolean is no integer.

    Raises:
        UserError: an argument has another type, or a path holds characters that no path can have (exit 2).
    """
    raise_if_any(
        _wrong(name, value, " or ".join(_name(one) for one in types))
        for name, (value, types) in given.items()
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
    )
    raise_if_any(
        Problem(
            f"the argument `{name}` can't be a path",
            found=repr(str(value))[:200],
            fix="correct the path",
            why="a path has no NUL and no half of a surrogate pair",
            code="path",
        )
        for name, (value, types) in given.items()
        if Path in types and isinstance(value, str | Path) and not _can_be_encoded(str(value))
    )


def check_recipe(recipe: Any, kind: type) -> None:
    """Refuse what is no recipe, or a recipe whose values `load_recipe` did not read and check (exit 2)."""
    check_types(recipe=(recipe, (kind,)))
    origin = getattr(recipe, "_origin", None)
    if origin is None or recipe.model_dump(warnings=False) != origin.checked:
        raise UserError(
            Problem(
                "the values of the recipe were not read from a file, so finetune has not checked them",
                fix='write them to a file, or give overrides: `finetune.load_recipe(FILE, ["adapter.r=8"])`',
                code="value-type",
            )
        )


def check_overrides(overrides: object) -> None:
    """Refuse overrides that are no list of texts, such as one text alone (exit 2)."""
    if isinstance(overrides, list | tuple):
        if all(isinstance(override, str) for override in overrides):
            return
        overrides = next(override for override in overrides if not isinstance(override, str))
    raise UserError(_wrong("overrides", overrides, 'a list such as ["adapter.r=8"]'))


def check_read(command: str, overrides: list[str]) -> None:
    """Refuse overrides of keys that a command on a finished run does not read (exit 2)."""
    read = ("model", "data", "speed", "eval") if command != "publish" else ("publish", "model", "data")
    other = [
        text for text in overrides if text.partition(".")[0] in {"train", "adapter", "publish"} - {*read}
    ]
    what, fix = f"`{command}` does not use this key", "remove the override"
    if other:
        raise UserError(
            *(
                Problem(
                    what,
                    text.partition("=")[0],
                    f"override {text!r}",
                    expected=f"keys of {', '.join(read)}",
                    fix=fix,
                    why="it was used in training, and the run is finished",
                    code="command-line",
                )
                for text in other
            )
        )
    named = {text.partition("=")[0] for text in overrides} if command != "publish" else set[str]()
    raise_if_any(
        Problem(what, key, fix=fix, why=f"the tokenizer of the run contains its {part}", code="command-line")
        for key, part in (("data.chat_template", "chat template"), ("model.add_tokens", "tokens"))
        if key in named
    )


def check_items(name: str, values: Collection[object], kind: type) -> None:
    """Refuse a list with a value that is no instance of `kind`, such as the class in place of an instance."""
    for value in values:
        if not isinstance(value, kind):
            raise UserError(
                Problem(
                    f"an item of the argument `{name}` has the wrong type",
                    found=f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__,
                    expected=f"instances of {kind.__name__}",
                    fix=f"derive the class from {kind.__name__}, and pass an instance",
                    code="value-type",
                )
            )


def check_choice(name: str, value: str | None, choices: Collection[str]) -> None:
    """Refuse a value that is none of the choices (exit 2). `None` is the default."""
    if value is not None and value not in choices:
        raise UserError(
            Problem(
                f"the argument `{name}` has an unknown value",
                code="value-choice",
                found=repr(value)[:200],
                expected=", ".join(choices),
                fix=nearest(value, choices),
            )
        )


def check_gpus(gpus: int | None) -> None:
    """Refuse a number of GPUs that no machine has (exit 2)."""
    if gpus is not None and not 1 <= gpus <= MOST_GPUS:
        raise UserError(
            Problem(
                "`gpus` has a wrong value",
                found=str(gpus) if abs(gpus) < 10**20 else f"an integer of {gpus.bit_length()} bits",
                expected=f"an integer from 1 to {MOST_GPUS:,}",
                code="value-range",
            )
        )


def check_device(device: str | None) -> None:
    """Refuse a text that names no device of this machine (exit 2)."""
    import torch

    try:
        torch.empty(0, device=device or "cpu")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(
            Problem(
                "the argument `device` names no device of this machine",
                found=f"{device!r}: {first_line(error)}"[:200],
                expected='"cpu", "cuda" or "cuda:1"',
                code="value-choice",
            )
        ) from None


@contextlib.contextmanager
def wrong_values() -> Iterator[None]:
    """Raise the errors of pydantic as errors of the arguments (exit 2)."""
    try:
        yield
    except ValidationError as error:
        raise UserError(*map(_wrong_value, error.errors())) from None


def _wrong_value(error: Any) -> Problem:
    """Return the problem of an argument that pydantic refuses, from one of `ValidationError.errors()`."""
    name, found = ".".join(map(str, error["loc"])), repr(error["input"])[:200]
    return Problem(
        f"the argument `{name}` has a wrong value",
        found=found,
        expected=error["msg"][:200],
        code="value-range",
    )


def _wrong(name: str, value: Any, expected: str) -> Problem:
    return Problem(
        f"the argument `{name}` has the wrong type",
        found=type(value).__name__,
        expected=expected,
        fix=f"pass {expected}",
        code="value-type",
    )


def _can_be_encoded(path: str) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def _name(one: type) -> str:
    return "None" if one is type(None) else one.__name__
