"""Read the values of a message that formats write under two names, such as `content` and `value`.

Parquet and Arrow files with messages of both formats have both keys in each message, one of them empty.
"""

from __future__ import annotations

from typing import Any

from finetune.data.examples import BadRow, short

EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of a key that has none


def role_of(turn: dict[str, Any]) -> Any:
    """Return the role under the name that the message uses."""
    return chosen(turn, "role", "from")


def content_of(turn: dict[str, Any]) -> Any:
    """Return a text or a list of parts."""
    return chosen(turn, "content", "value")


def text_of(part: dict[str, Any]) -> Any:
    """Return the text of a part of the content, or another value that it holds."""
    return chosen(part, "text", "value")


def chosen(holder: dict[str, Any], first: str, second: str) -> Any:
    """Return the value of the key that has one. If both have one, it is the first."""
    one, other = holder.get(first), holder.get(second)
    return other if one in EMPTY and (other not in EMPTY or first not in holder) else one


def check_alike(holder: dict[str, Any], where: str, *pairs: tuple[str, str]) -> None:
    """Check that the two keys of each pair do not hold different values.

    Raises:
        BadRow: both have a value, and the values differ.
    """
    for first, second in pairs:
        one, other = holder.get(first), holder.get(second)
        if one not in EMPTY and other not in EMPTY and one != other:
            raise BadRow(
                "malformed",
                f"a message or tool has a `{first}` and another `{second}`",
                where,
                f"{short(one)} and {short(other)}",
                fix="keep the key of one format",
            )
