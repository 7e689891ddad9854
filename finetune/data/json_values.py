"""Convert decoded JSON to a row, or to an error that says what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from finetune.data import hints
from finetune.data.examples import BadRow, Row, short


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
MOST_LEVELS = 100  # of nested lists and dicts. Functions that call themselves fail at a few hundred
DECODER = json.JSONDecoder(object_pairs_hook=mapping)


def is_surely_small(text: str | bytes) -> bool:
    """Return whether JSON text has too few characters and brackets to exceed a limit of its values."""
    if len(text) > 2 * MOST_VALUES:  # a value and its comma take two characters
        return False
    brackets = (
        text.count("[") + text.count("{") if isinstance(text, str) else text.count(b"[") + text.count(b"{")
    )
    return brackets <= MOST_LEVELS


def json_of(value: object, what: str, where: str) -> Any:
    """Parse a value if it is JSON text. Otherwise check that JSON can represent the value."""
    try:
        if not isinstance(value, str):
            json.dumps(value, allow_nan=False)
            return value
        found = json.loads(value, parse_constant=_no_constant, object_pairs_hook=mapping)
        if "e" in value.lower():  # a number such as 1e400 is read as infinity, which JSON does not have
            json.dumps(found, allow_nan=False)
        if "\\ud" in value.lower():  # half of a surrogate pair is not a character
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError):
        raise BadRow("malformed", f"{what} must be valid JSON", where, found=short(value)) from None
    if not is_surely_small(value) and (error := size_error(found, where)):
        raise error
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def size_error(value: object, where: str) -> BadRow | None:
    """Return the error for lists and dicts with too many values or levels, or `None`."""
    left, level = MOST_VALUES, [value]
    for _ in range(MOST_LEVELS + 1):
        below = []
        for holder in level:
            parts = (
                holder.values() if isinstance(holder, dict) else holder if isinstance(holder, list) else ()
            )
            left -= len(parts)
            if left < 0:
                return too_many_values(where)
            below += [part for part in parts if isinstance(part, dict | list)]
        if not below:
            return None
        level = below
    return BadRow(
        "unreadable",
        "the example has too many nested lists and objects",
        where,
        expected=f"at most {MOST_LEVELS}",
        code="data-size",
    )


def too_many_values(where: str) -> BadRow:
    """Return the error for an example that would take long to render and to compare."""
    return BadRow(
        "unreadable",
        "the example has too many values",
        where,
        expected=f"at most {MOST_VALUES:,}",
        code="data-size",
    )


def checked_row(value: object, where: str, escapes: bool, *, is_small: bool = False) -> Row | BadRow:
    """Return a decoded value as a row, or the error that says why it is not a row.

    Args:
        escapes: whether the value can contain half of a surrogate pair, which is not a character.
        is_small: whether the value is known to be within the limits.
    """
    if not is_small and (error := size_error(value, where)):
        return error
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
