"""Convert rows of every supported format to an `Example`: a chat, a prompt and completion, or a text.

messages            {"messages": [{"role", "content"}]}
prompt_completion   {"prompt", "completion"}
alpaca              {"instruction", "input", "output", "history"}
sharegpt            {"conversations": [{"from", "value"}]}
text                {"text"}

- A messages chat can also be under `conversations`, and a content can be a list of parts.
- Prompt and completion are two texts or two lists of messages.
- `history` of alpaca is a list of [instruction, output] pairs.

finetune uses the `tools` and `system` columns if they exist. A row in no supported format is a `BadRow`.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError, nearest, raise_if_any
from finetune.data import hints, message_weights, tool_calls
from finetune.data.examples import BadRow, Example, Message, Row, short
from finetune.data.json_values import json_of, size_error
from finetune.data.message_keys import content_of, role_of, text_of
from finetune.data.messages import BESIDE, PLAIN, read, separate_results, system_text, tools

if TYPE_CHECKING:
    from finetune.recipe.schema import Data

COLUMNS = {  # the columns of each format; detection tries the formats in this order
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = ("input", "system", "tools", "history")
MESSAGE_KEYS = {
    *PLAIN,
    "from",
    "value",
    "tool_calls",
    "function_call",
    "train",
    "weight",
    "loss_weight",
    *BESIDE,
}
PART_KEYS = {"type", *message_weights.NUMBERS}  # of each content part
OWN_PART_KEYS = {  # of the parts of a type
    "text": {"text", "value"},
    "reasoning": {"text", "value"},
    "tool_call": {"text", "value"},
    "thinking": {"thinking"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content"},
}
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}


def digest(row: Row, seed: int, data: Data) -> int:
    """Return a 64-bit hash of the columns that finetune reads, salted with `seed`."""
    columns = {*(column for needed in COLUMNS.values() for column in needed), *OPTIONAL}
    columns |= set(data.columns.values())
    content = json.dumps(
        {k: row.value[k] for k in row.value if k in columns}, sort_keys=True, default=str, skipkeys=True
    )
    hashed = hashlib.blake2b(content.encode(), digest_size=8, salt=seed.to_bytes(8))
    return int.from_bytes(hashed.digest())


def conversations(row: Row, data: Data) -> tuple[int, ...]:
    """Return a 64-bit hash for each id and for the first turn, which identify the conversation of a row."""
    value = _renamed(row, data)
    ids = [
        f"{name} {value[name]}" for name in ("id", "conversation_id") if type(value.get(name)) in (str, int)
    ]
    first = _first_turn(value, data)
    said = [*ids, *([f"first {first}"] if first else [])]
    hashed = (hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest() for text in said)
    return tuple(map(int.from_bytes, hashed))


def _first_turn(value: dict[str, Any], data: Data) -> str:
    """Return the first text that is not a system message, or an empty string."""
    for name in ("messages", "conversations", "prompt"):
        turns = value.get(name)
        for turn in turns if isinstance(turns, list) else ():
            named = role_of(turn) if isinstance(turn, dict) else "system"
            if data.role_map.get(str(named), named) != "system":
                return json.dumps(content_of(turn), default=str)
    history = value.get("history")
    if isinstance(history, list) and history and isinstance(history[0], list) and history[0]:
        return json.dumps(history[0][0], default=str)
    if isinstance(requested := value.get("prompt"), str):
        return json.dumps(requested) if requested.strip() else ""
    if isinstance(requested := value.get("instruction"), str) and requested.strip():
        more = value.get("input")
        return json.dumps(f"{requested}\n\n{more}" if isinstance(more, str) and more.strip() else requested)
    return ""


def detect(row: Row, data: Data) -> str:
    """Return the format that the recipe names, or the format that matches the row's columns.

    Raises:
        UserError: no format matches (exit 2).
    """
    _check_columns(row, data)
    if data.format != "auto":
        return data.format
    value = _renamed(row, data)
    if seen := _seen(value):
        return seen
    why, fix = hints.columns([str(name) for name in value], value, row.where.rpartition(":")[0])
    raise UserError(
        Problem(
            "the columns match no known format",
            "data.columns",
            where=row.where,
            found=", ".join(map(str, value)),
            expected="messages | conversations | prompt, completion | instruction, output | text",
            fix=fix,
            why=why,
            code="data-format",
        )
    )


def _seen(value: dict[str, Any]) -> str:
    """Return the format that matches these columns, or an empty string."""
    for name, needed in COLUMNS.items():
        if all(column in value for column in needed):
            turns = value.get("conversations") if name == "sharegpt" else None
            plain = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
            return "messages" if plain else name
    return ""


def of_another_format(bad: BadRow, row: Row, data: Data, format: str) -> BadRow:
    """Return the error for a row that is not valid in `format`.

    It names the row's own format if that differs.
    """
    value = {name: part for name, part in _renamed(row, data).items() if part is not None}
    seen, chats = _seen(value), ("messages", "sharegpt")
    if {seen, format} == set(chats):  # both formats can use either column name, so the roles decide
        another = bool(bad.roles) and seen == "sharegpt"
    else:
        another = bool(seen) and any(column not in value for column in COLUMNS[format])
    if not another or seen == format:
        return bad
    other = BadRow(
        "malformed",
        "this example has another format than the first one",
        row.where,
        seen,
        expected=format,
        code="data-format",
    )
    other.format = seen
    return other


def unused(row: Row, data: Data, format: str) -> list[str]:
    """Return the columns and message keys of a row that hold a value but are not used."""
    value = _renamed(row, data)
    plain = format == "text" or _asked_plainly(value, format)
    optional = () if plain else ("system", "tools", *(("input", "history") if format == "alpaca" else ()))
    chat = format in ("messages", "sharegpt")
    read = (_chat_column(value, format),) if chat else COLUMNS[format]
    left = {str(name) for name, part in value.items() if name not in (*read, *optional) and _says(part)}
    columns = [name for name in (*read, "prompt", "completion") if isinstance(value.get(name), list)]
    turns = [turn for name in set(columns) for turn in value[name]] if not plain else []
    turns = [turn for turn in turns if isinstance(turn, dict)]
    keys = {key for turn in turns if turn.keys() != PLAIN for key in turn}
    for key in keys - MESSAGE_KEYS:
        if any(_says(turn.get(key)) for turn in turns):
            left.add(f"{key} of a message")
    for key in keys.intersection(message_weights.KEYS) if data.train_on != "all" else ():
        if any(turn.get(key) and _has_no_loss(turn, value, format, data) for turn in turns):
            left.add(f"{key} of a message without loss")
    system = [] if plain else [{"content": value.get("system")}]
    parts = [part for turn in (*turns, *system) for part in _parts_of(turn)]
    parts += [inner for part in parts if part.get("type") == "tool_result" for inner in _parts_of(part)]
    left |= {
        f"{key} of a content part" for part in parts for key in _unused_of_part(part) if _says(part[key])
    }
    if any(map(_is_reordered, turns)):
        left.add("the order of the parts of a message")
    left |= {
        f"{key} of a tool call"
        for turn in turns
        if turn.keys() != PLAIN or not isinstance(turn["content"], str)
        for key in _unused_of_calls(turn, row.where)
    }
    return sorted(left)


def _unused_of_part(part: dict[str, Any]) -> set[str]:
    """Return the keys of a content part that are not used for its type."""
    return part.keys() - PART_KEYS - OWN_PART_KEYS.get(str(part.get("type")), set())


def _is_reordered(turn: dict[str, Any]) -> bool:
    """Return whether the parts are in another order than in a template: reasoning, text, tool calls."""
    ranks = {"reasoning": 0, "thinking": 0, "tool_call": 2, "tool_use": 2}
    found = [ranks.get(str(part.get("type")), 1) for part in _parts_of(turn)]
    return found != sorted(found)


def _unused_of_calls(turn: dict[str, Any], where: str) -> set[str]:
    """Return the keys of a message's tool calls that are not used."""
    try:
        return {key for call in _calls_of(turn, where) for key in tool_calls.unused(call, where)}
    except BadRow:  # `convert` raises it too
        return set()


def _calls_of(turn: dict[str, Any], where: str) -> list[Any]:
    """Return the tool calls of a message as they are in the row."""
    held = [turn.get("tool_calls"), turn.get("function_call")]
    held += [text_of(part) for part in _parts_of(turn) if part.get("type") == "tool_call"]
    if role_of(turn) == "function_call":
        held.append(content_of(turn))
    return [call for calls in held for call in tool_calls.listed(calls, where)]


def _has_no_loss(turn: dict[str, Any], value: dict[str, Any], format: str, data: Data) -> bool:
    """Return whether a message is a prompt, so that its weights have no effect."""
    role = _roles(format, data).get(str(role_of(turn)), role_of(turn))
    is_prompt = format == "prompt_completion" and any(turn is other for other in value["prompt"])
    return role != "assistant" or is_prompt


def _parts_of(turn: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a message's content if it is a list of them."""
    content = content_of(turn)
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _says(part: object) -> bool:
    """Return whether a column holds a value. False, 0 and an empty list are values."""
    return part is not None and part != ""


def _chat_column(value: dict[str, Any], format: str) -> str:
    """Return the column that holds the chat. Both chat formats can use either column name."""
    chats = "conversations" not in value and format != "sharegpt"
    return "messages" if chats or "messages" in value else "conversations"


def _asked_plainly(value: dict[str, Any], format: str) -> bool:
    """Return whether prompt and completion are texts, which cannot have a system message or tools."""
    return format == "prompt_completion" and isinstance(value.get("prompt"), str)


def convert(row: Row, data: Data, format: str) -> Example:
    """Convert one row to an example.

    Raises:
        BadRow: the row is not valid in this format.
    """
    value = _renamed(row, data)
    if format == "text":
        return Example(row.where, completion=_text(value, "text", row))
    if _asked_plainly(value, format):
        return Example(
            row.where,
            prompt=_text(value, "prompt", row, empty=True),
            completion=_text(value, "completion", row),
        )
    roles = _roles(format, data)
    turns, given = _turns(value, format, row)
    untrained = 0 if data.train_on == "all" else given
    messages, weights = read(turns, roles, data.reasoning == "cut", row.where, untrained)
    if value.get("system"):
        messages = _with_system(messages, system_text(value["system"], row.where))
    offered = tools(value.get("tools"), row.where)
    # JSON texts inside the row add values that the reader did not count
    if error := size_error([messages, offered], row.where):
        raise error
    trained = tuple(any((weight, *(w for *_, w in spans))) for weight, spans in weights)
    whole = all(weight in (0, 1) and not spans for weight, spans in weights)
    return Example(row.where, messages, offered, trained, () if whole else weights)


def _roles(format: str, data: Data) -> dict[str, str]:
    """Return the standard role of each other name of a role."""
    return {**(SHAREGPT_ROLES if format == "sharegpt" else {}), **data.role_map}


def _with_system(messages: list[Message], column: str) -> list[Message]:
    """Add the text of the `system` column before the chat's own system message, if it has one."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": column}, *messages] if column.strip() else messages
    own = messages[0]["content"]
    if column.strip() in ("", own.strip()):
        return messages
    return [{**messages[0], "content": f"{column}\n\n{own}"}, *messages[1:]]


def _turns(value: dict[str, Any], format: str, row: Row) -> tuple[list[Any], int]:
    """Return the messages of a row without changes, and the number of messages before the completion."""
    if format == "alpaca":
        instruction = _text(value, "instruction", row)
        more = _text(value, "input", row, empty=True) if value.get("input") is not None else ""
        content = f"{instruction}\n\n{more}" if more.strip() else instruction
        answer = _text(value, "output", row)
        last = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        return [*_history(value, row), *last], 0
    if format == "prompt_completion":
        given, answer = _list(value, "prompt", row), _list(value, "completion", row)
        given, answer = separate_results(given), separate_results(answer)
        return [*given, *answer], len(given)
    return separate_results(_list(value, _chat_column(value, format), row)), 0


def _history(value: dict[str, Any], row: Row) -> list[Message]:
    """Return the earlier turns of an alpaca row, which holds them as pairs of instruction and answer."""
    pairs = _list(value, "history", row) if value.get("history") else []
    turns: list[Message] = []
    for pair in pairs:
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise BadRow(
                "malformed",
                "`history` must be a list of pairs",
                row.where,
                short(pair),
                expected="[instruction, answer]",
            )
        turns += [
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return turns


def _renamed(row: Row, data: Data) -> dict[str, Any]:
    """Return the row with its columns renamed by `data.columns`."""
    if not data.columns:
        return row.value
    renamed = {ours: row.value.get(theirs) for ours, theirs in data.columns.items()}
    return {**{k: v for k, v in row.value.items() if k not in data.columns.values()}, **renamed}


def _check_columns(row: Row, data: Data) -> None:
    """Raise a UserError if `data.columns` does not match the first row (exit 2)."""
    known = {column for needed in COLUMNS.values() for column in needed} | set(OPTIONAL)
    problems = []
    for ours, theirs in data.columns.items():
        if ours not in known:
            key, what, near = (
                f"data.columns.{ours}",
                "finetune has no column of this name",
                nearest(ours, known),
            )
            problems.append(
                Problem(
                    what,
                    key,
                    expected="" if near else ", ".join(sorted(known)),
                    fix=f"rename it to `{near}`" if near else "",
                    code="unknown-key",
                )
            )
        elif theirs not in row.value and ours not in OPTIONAL:
            found, near = ", ".join(map(str, row.value)), nearest(theirs, row.value)
            why, fix = f"data.columns reads `{ours}` from this column", f"{ours}: {near}" if near else ""
            if not fix:
                rest = [str(name) for name in row.value if name not in data.columns.values()]
                fix = f"{ours}: {rest[0]}" if len(rest) == 1 else f"write one of these names after `{ours}:`"
            problems.append(
                Problem(
                    f'the example has no column "{theirs}"',
                    f"data.columns.{ours}",
                    where=row.where,
                    found=found,
                    fix=fix,
                    why=why,
                    code="data-format",
                )
            )
    raise_if_any(problems)


def _text(value: dict[str, Any], column: str, row: Row, empty: bool = False) -> str:
    text = value.get(column)
    if not isinstance(text, str):
        raise BadRow(
            "malformed",
            f"`{column}` must be a string",
            row.where,
            short(text),
            fix=f'write it as a string: "{text}"' if type(text) in (int, float) and text == text else "",
        )
    if not (empty or text.strip()):
        raise BadRow("malformed", f"`{column}` is empty", row.where)
    return text


def _list(value: dict[str, Any], column: str, row: Row) -> list[Any]:
    turns = value.get(column)
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # as in a column of a CSV file
        turns = json_of(turns, column, row.where)
    if not isinstance(turns, list) or not turns:
        kinds = "a string or a list of messages" if column == "prompt" else "a list of messages"
        raise BadRow("malformed", f"`{column}` must be {kinds}", row.where, found=short(turns))
    return turns
