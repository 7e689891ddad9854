"""`--json`: one JSON object on standard output. All other text goes to standard error.

    {"format_version": 1, "command": "check", "exit_code": 0, "result": {"notes": []}, "problems": []}

`result` is null if the command failed. `problems` has an object for each error, with the fields of
`core.errors.Problem`. The documentation describes the result of each command.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.core.errors import Problem
from finetune.core.privacy import masked_json

FORMAT_VERSION = 1


def render(command: str, exit_code: int, result: object, problems: Sequence[Problem]) -> str:
    """Return the object of a command as text, without secrets."""
    shown = [{key: value for key, value in vars(problem).items() if value} for problem in problems]
    content = {
        "format_version": FORMAT_VERSION,
        "command": command,
        "exit_code": int(exit_code),
        "result": plain(result),
        "problems": plain(shown),
    }
    return masked_json(content)


def plain(value: object) -> Any:
    """Convert a value for JSON: dataclasses to objects, paths to strings, NaN and Inf to null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if as_dict := getattr(value, "_asdict", None):  # a NamedTuple
        return plain(as_dict())
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(one) for one in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value) if isinstance(value, (str, Path)) else repr(value)
