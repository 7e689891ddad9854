"""Read the weights of the loss from the messages of a chat.

A message has one weight from 0 to 1. If its content is a list of parts, each part of text can have its own
weight. It replaces the message's weight for this text.
"""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from finetune.data.examples import BadRow, TurnWeights, short
from finetune.data.message_keys import content_of, text_of

FLAG, NUMBERS = "train", ("weight", "loss_weight")
KEYS = (FLAG, *NUMBERS)
SMALLEST = 1e-6  # a sum of smaller weights can be 0 in fp32, and the loss is divided by it


def of_answer(turn: dict[str, Any], content: str, where: str) -> TurnWeights:
    """Return the weights of one message of the assistant.

    Args:
        turn: the message as it is in the row.
        content: its text in the chat, by which the positions of the parts are checked.
    """
    message, parts = _of_message(turn, where), _of_parts(turn, where)
    if parts is None:
        return TurnWeights(message)
    if "".join(text for text, _ in parts) != content:
        raise BadRow(
            "malformed",
            "`reasoning: cut` changes a message whose parts have weights",
            where,
            fix="data.reasoning: keep",
            code="recipe-conflict",
        )
    if turn.get(FLAG) in (False, 0) and any(weight for _, weight in parts):
        raise _contradict(where, f"{FLAG}: false, and parts with a weight")
    spans, start = [], 0
    for weight, run in groupby(parts, key=itemgetter(1)):
        end = start + sum(len(text) for text, _ in run)
        if weight is not None and weight != message:
            spans.append((start, end, weight))
        start = end
    return TurnWeights(message, tuple(spans))


def check_others(turn: dict[str, Any], where: str) -> None:
    """Check the weights of a message that is not the assistant's. Each such message has no loss.

    Raises:
        BadRow: a part has a weight, or the message has a weight between 0 and 1.
    """
    parts = _of_parts(turn, where)
    if parts is not None or _of_message(turn, where) not in (0, 1):
        raise BadRow(
            "malformed",
            "only the assistant's messages can have weights of the loss",
            where,
            fix="remove the weight",
        )


def _of_message(turn: dict[str, Any], where: str) -> float:
    """Return the weight by the keys `train` (true or false), `weight` and `loss_weight`."""
    given = {key: turn[key] for key in KEYS if turn.get(key) is not None}
    if FLAG in given and given[FLAG] not in (0, 1):
        raise BadRow(
            "malformed",
            "the flag to train on a message has a wrong value",
            where,
            found=short(given[FLAG]),
            expected="true or false, 1 or 0",
        )
    numbers = {_number(given[key], where) for key in NUMBERS if key in given}
    weight = next(iter(numbers), float(given.get(FLAG, True)))
    if len(numbers) > 1 or (FLAG in given and bool(given[FLAG]) != bool(weight)):
        raise _contradict(where, ", ".join(f"{key}: {value}" for key, value in given.items()))
    return weight


def _of_parts(turn: dict[str, Any], where: str) -> list[tuple[str, float | None]] | None:
    """Return text and weight of each part of text; `None` if no part has a weight."""
    parts = content_of(turn)
    if not isinstance(parts, list) or not any(_weight_of_part(part, where) is not None for part in parts):
        return None
    found = []
    for part in parts:
        weight = _weight_of_part(part, where)
        if isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text"):
            text = part if isinstance(part, str) else text_of(part)
            found.append((text, None if weight is None else _number(weight, where)))
        elif weight is not None:
            raise BadRow(
                "malformed",
                "only a part of text can have a weight of the loss",
                where,
                found=short(part.get("type")),
                fix="write the weight of the whole message",
            )
    return found


def _weight_of_part(part: object, where: str) -> Any:
    given = [part[key] for key in NUMBERS if part.get(key) is not None] if isinstance(part, dict) else []
    if any(value != given[0] for value in given):
        raise _contradict(where, " and ".join(map(short, given)))
    return given[0] if given else None


def _number(value: object, where: str) -> float:
    if isinstance(value, int | float) and (value == 0 or SMALLEST <= value <= 1):  # NaN is neither
        return float(value)
    raise BadRow(
        "malformed",
        "the weight of the loss has a wrong value",
        where,
        found=short(value),
        expected="0, or a number from 0.000001 to 1",
    )


def _contradict(where: str, found: str) -> BadRow:
    return BadRow("malformed", "the weights of a message contradict each other", where, found=found)
