"""Convert decoded JSON to a row, or to an error that says what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from finetune.data import hints
from finetune.data.examples import BadRow, Row


def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Create a dict from a JSON object.

    A duplicate key is an error, because readers disagree on which value counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f'the key "{twice}" has two values')
    return found


MOST_VALUES = 100_000  # of one example: list items and dict values
# JSON of this size in bytes cannot exceed the limit, because a value and its comma take two bytes
UNCOUNTED = 2 * MOST_VALUES
DECODER = json.JSONDecoder(object_pairs_hook=mapping)


def has_too_many_values(value: object) -> bool:
    """Return whether the lists and dicts in a value hold more than `MOST_VALUES` values."""
    left, waiting = MOST_VALUES, [value]
    while waiting and left >= 0:
        holder = waiting.pop()
        parts = holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()
        left -= len(parts)
        waiting += [part for part in parts if isinstance(part, dict | list)] if left >= 0 else ()
    return left < 0


def too_many_values(where: str) -> BadRow:
    """Return the error for an example that would take long to render and to compare."""
    return BadRow(
        "unreadable",
        "the example has too many values",
        where,
        expected=f"at most {MOST_VALUES:,}",
        code="data-size",
    )


def checked_row(value: object, where: str, escapes: bool, size: int = UNCOUNTED + 1) -> Row | BadRow:
    """Return a decoded value as a row, or the error that says why it is not a row.

    Args:
        escapes: whether the value can contain half of a surrogate pair, which is not a character.
        size: bytes of its JSON, if known.
    """
    if size > UNCOUNTED and has_too_many_values(value):
        return too_many_values(where)
    if not isinstance(value, dict):
        fix, found = hints.value(value), json.dumps(value) if not isinstance(value, list) else "an array"
        return BadRow("unreadable", "an example must be a JSON object", where, found[:60], fix=fix)
    if escapes:
        try:
            # columns of Arrow tables can hold values and keys that JSON cannot represent
            json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
        except UnicodeEncodeError as error:
            return BadRow(
                "unreadable",
                "the example has half of a surrogate pair, which is not a character",
                where,
                found=ascii(error.object[error.start]),
            )
    return Row(value, where)


def may_hold_surrogates(content: bytes) -> bool:
    return b"\\ud" in content or b"\\uD" in content
