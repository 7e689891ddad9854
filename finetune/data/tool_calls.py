"""Read the tool calls of a message, which datasets and libraries write in several forms."""

from __future__ import annotations

from typing import Any

from finetune.data.examples import BadRow, short
from finetune.data.json_values import json_of
from finetune.data.message_keys import EMPTY

# The arguments in the forms of OpenAI, Llama 3, LangChain and Anthropic
ARGUMENTS = ("arguments", "parameters", "args", "input")
# The keys of a call that are read, or that say nothing else. Other keys are counted as unused
KEYS = {"id", "type", "index", "name", "function", *ARGUMENTS}


def listed(calls: object, where: str) -> list[Any]:
    """Return the tool calls of a message, which holds none, one call or a list. JSON text is parsed."""
    if isinstance(calls, str) and calls.strip():
        calls = json_of(calls, "a tool call", where)
    return calls if isinstance(calls, list) else [calls] if calls else []


def normalized(call: object, where: str) -> dict[str, Any]:
    """Return a tool call in the form that chat templates expect. Its arguments are a mapping.

    Raises:
        BadRow: the call has no name, its arguments are no mapping, or two keys hold other arguments.
    """
    parsed = json_of(call, "a tool call", where)
    function = parsed.get("function", parsed) if isinstance(parsed, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise BadRow("malformed", "a tool call has no name", where, found=short(parsed))
    more = {"id": parsed["id"]} if parsed.get("id") else {}
    arguments = _arguments(function, parsed, where)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **more}


def _arguments(function: dict[str, Any], call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the arguments. Any key in ARGUMENTS can hold them, in the function or next to it."""
    holders = (function,) if function is call else (function, call)
    given = [holder[key] for holder in holders for key in ARGUMENTS if key in holder]
    if "arguments" in function and _is_schema(function.get("parameters")):
        given.remove(function["parameters"])  # a definition of the function, as in `tools`
    parsed = [json_of(value, "a tool call's arguments", where) for value in given if value not in EMPTY]
    found = [value for value in parsed if value is not None and value != []]
    wrong = [value for value in found if not isinstance(value, dict)]
    if wrong:
        raise BadRow("malformed", "a tool call's arguments must be a mapping", where, found=short(wrong[0]))
    kinds = [value for number, value in enumerate(found) if value and value not in found[:number]]
    if len(kinds) > 1:
        raise BadRow(
            "malformed",
            "a tool call has its arguments twice, and they differ",
            where,
            found=" and ".join(map(short, kinds)),
            fix=f"keep one key: {', '.join(ARGUMENTS)}",
        )
    return kinds[0] if kinds else {}


def _is_schema(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("properties"), dict)


def unused(call: object, where: str) -> set[str]:
    """Return the keys of a tool call, and of its function, that hold a value but are not used."""
    parsed = json_of(call, "a tool call", where)
    holders = [parsed, parsed.get("function")] if isinstance(parsed, dict) else []
    return {
        str(key)
        for holder in holders
        if isinstance(holder, dict)
        for key, value in holder.items()
        if key not in KEYS and value not in (None, "")
    }


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
