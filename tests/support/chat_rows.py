"""Rows of chats, and what is wrong with bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert, detect
from finetune.recipe.schema import Data

USER, ANSWER = {"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Maria did."}
CHAT = [USER, ANSWER]
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "door"}}}


def row(**value: Any) -> Row:
    return Row(value, "rows.jsonl:7")


def read(value: Row, **data: Any) -> Example:
    recipe = Data(name="-", **data)
    return convert(value, recipe, detect(value, recipe))


def chat(*messages: Any, **more: Any) -> Example:
    settings = {key: more.pop(key) for key in ("reasoning", "role_map", "train_on") if key in more}
    return read(row(messages=list(messages), **more), **settings)


def bad(value: Row, **data: Any) -> BadRow:
    with pytest.raises(BadRow) as raised:
        read(value, **data)
    assert raised.value.problem.where.startswith("rows.jsonl:7")
    return raised.value


def bad_chat(*messages: Any, **data: Any) -> BadRow:
    return bad(row(messages=list(messages)), **data)
