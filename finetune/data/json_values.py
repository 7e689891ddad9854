"""JSON that is decoded to a row, or to what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

from finetune.data import hints
from finetune.data.examples import BadRow, Row


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; Python would take the last of two values, other readers the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'two values of the key "{twice}"')
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_mapping)


def checked_row(value: object, where: str, escapes: bool) -> Row | BadRow:
    """A value of a JSON file; `escapes`: it may hold one half of a surrogate pair, which no text can."""
    if not isinstance(value, dict):
        fix, found = hints.value(value), json.dumps(value) if not isinstance(value, list) else "an array"
        return BadRow("unreadable", "a row must be a JSON object", where, found[:60], fix=fix)
    if escapes:
        try:
            # Columns of Arrow tables may hold values and keys that JSON has no form for
            json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start])
            return BadRow("unreadable", "half of a surrogate pair, which is no character", where, found=found)
    return Row(value, where)


def may_hold_surrogates(content: bytes) -> bool:
    return b"\\ud" in content or b"\\uD" in content
