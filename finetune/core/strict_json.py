"""JSON that every reader takes: it has no NaN and no infinity, though Python writes them.

They stand as "nan", "inf" and "-inf", in eval.json as in metrics.jsonl; read, they are numbers again.
"""

from __future__ import annotations

import math
from typing import Any

MOST_PARTS = 5_000_000  # brackets, braces and commas of a file; the tokenizer of Gemma has 2,300,000
DEEPEST = 40  # nested lists and objects of a file
SPELT = ("nan", "inf", "-inf")
# parts of eval.json that hold numbers
SCORES = ("base", "tuned", "difference", "tasks", "sources", "examples")
LOSSES = ("base_loss", "tuned_loss")
TEXTS = ("source", "settings", "verdict")  # among them


def spelt(value: object) -> Any:
    """Nested lists and dicts, with the numbers that JSON lacks as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: spelt(part) for key, part in value.items()}
    return [spelt(part) for part in value] if isinstance(value, (list, tuple)) else value


def check_size(text: str | bytes, most: int = MOST_PARTS) -> None:
    """Refuse JSON with so many values that they would fill the memory, before it is parsed.

    Raises:
        ValueError: it has.
    """
    count = sum(text.count(mark) for mark in b"[{,") if isinstance(text, bytes) else 0
    count += sum(text.count(mark) for mark in "[{,") if isinstance(text, str) else 0
    if count > most:
        raise ValueError(f"about {count:,} values, and {most:,} are allowed")


def check_depth(value: object, levels: int = DEEPEST) -> None:
    """Refuse JSON that nests lists and objects too deeply for functions that call themselves.

    Raises:
        ValueError: it does.
    """
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inner:
        if isinstance(one, (dict, list)):
            if not levels:
                raise ValueError(f"more than {DEEPEST} levels")
            check_depth(one, levels - 1)


def number(value: object) -> Any:
    """A number that stands as text, as a number."""
    return float(value) if isinstance(value, str) and value in SPELT else value


def scores(content: dict[str, Any]) -> dict[str, Any]:
    """The content of eval.json with its numbers; what rows and answers say stays text."""
    converted = {key: _numbers(value) if key in SCORES else value for key, value in content.items()}
    if worst := converted.get("worst"):
        converted["worst"] = [{k: _numbers(v) if k in LOSSES else v for k, v in row.items()} for row in worst]
    return converted


def _numbers(value: object) -> Any:
    if isinstance(value, str) and value in SPELT:
        return float(value)
    if isinstance(value, dict):
        return {key: part if key in TEXTS else _numbers(part) for key, part in value.items()}
    return [_numbers(part) for part in value] if isinstance(value, list) else value
