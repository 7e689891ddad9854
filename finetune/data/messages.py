"""Normalize the messages of a chat to a standard role and one text each, in order.

Reasoning and tool calls are separate keys of a message, as chat templates expect them.
"""

from __future__ import annotations

import re
from typing import Any

from finetune.data import hints, message_weights, tool_calls
from finetune.data.examples import BadRow, Message, TurnWeights, short
from finetune.data.json_values import json_of
from finetune.data.message_keys import check_alike, chosen, content_of, role_of, text_of

ROLES = ("system", "user", "assistant", "tool")
THINKING = re.compile(r"(?:<think>|\A)(?:(?!<think>).)*?</think>\s*", re.DOTALL)
"""The opening tag can be part of the prompt. Then the answer has only the closing tag."""
PLAIN = {"role", "content"}
CALLS = ("tool_calls", "function_call")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Types of Anthropic's content parts, besides text. A user message can also have `tool_result`
ANTHROPIC = ("thinking", "tool_use")
# Other keys of a message that are kept, besides role, content and tool calls
BESIDE = ("name", "tool_call_id", *REASONING_KEYS)
FULL_LOSS, NO_LOSS = TurnWeights(1.0), TurnWeights(0.0)


def read(
    turns: list[Any], roles: dict[str, str], cut: bool, where: str, untrained: int = 0
) -> tuple[list[Message], tuple[TurnWeights, ...]]:
    """Return the messages of a chat, and the weights of the loss of each assistant message.

    Args:
        turns: the messages as they are in the row.
        roles: maps other role names to names in `ROLES`.
        cut: remove reasoning from the assistant's messages.
        where: the position of the row.
        untrained: number of messages at the beginning that are a prompt. Their weights are 0.

    Raises:
        BadRow: the messages cannot be used.
    """
    try:
        messages = [_message(turn, number, roles, cut, where) for number, turn in enumerate(turns)]
    except BadRow as bad:
        raise _with_all_roles(bad, turns, roles) from None
    weights = []
    for number, (message, turn) in enumerate(zip(messages, turns, strict=True)):
        if message["role"] == "assistant":
            weights.append(_weights(turn, message, f"{where}, message {number}", number < untrained))
        elif turn.keys() != PLAIN or isinstance(turn["content"], list):
            message_weights.check_others(turn, f"{where}, message {number}")
    messages = [message for message in messages if not _blank_system(message)]
    _check_order(messages, where)
    return messages, tuple(weights)


def system_text(column: object, where: str) -> str:
    """Return the text of a `system` column, which can be a list of content parts."""
    if isinstance(column, list):
        column, reasoning, calls = _parts(column, where)
        column = None if reasoning or calls else column
    if not isinstance(column, str):
        raise BadRow("malformed", "`system` must be a string", where, short(column))
    return column


def tools(given: object, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row in the form that chat templates expect.

    A column can hold them as JSON text.
    """
    if not given:
        return None
    found = json_of(given, "tools", where)
    found = [json_of(tool, "tools", where) for tool in found] if isinstance(found, list) else found
    good = isinstance(found, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in found
    )
    if not good:
        raise BadRow("malformed", "`tools` must be a list of mappings", where, found=short(found))
    nameless = [tool for tool in found if not tool_calls.is_text(tool.get("function", tool).get("name"))]
    if nameless:
        raise BadRow("malformed", "a tool has no name", where, found=short(nameless[0]))
    return [tool if "function" in tool else _function(tool, where) for tool in found] or None


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form. Anthropic names its parameters `input_schema`."""
    if "input_schema" in tool and "parameters" in tool:
        check_alike(tool, where, ("parameters", "input_schema"))
        parameters = chosen(tool, "parameters", "input_schema")
        tool = {key: value for key, value in tool.items() if key != "input_schema"} | {
            "parameters": parameters
        }
    own = {"parameters" if key == "input_schema" else key: value for key, value in tool.items()}
    return {"type": "function", "function": own}


def _with_all_roles(bad: BadRow, turns: list[Any], roles: dict[str, str]) -> BadRow:
    """Add all unknown roles of the row to an error about one unknown role."""
    if not bad.roles:
        return bad
    named = [role_of(turn) for turn in turns if isinstance(turn, dict)]
    unknown = [str(name) for name in named if name is not None and roles.get(str(name), name) not in ROLES]
    bad.roles, said = tuple(dict.fromkeys(unknown)), bad.problem
    more = BadRow(
        bad.kind,
        said.what,
        said.where,
        ", ".join(map(short, bad.roles)),
        expected=said.expected,
        fix=hints.role_map(bad.roles),
    )
    more.roles = bad.roles
    return more


def _message(turn: object, number: int, roles: dict[str, str], cut: bool, row: str) -> Message:
    """Normalize one message to a known role, one text, reasoning and tool calls."""
    if not roles and isinstance(turn, dict) and turn.keys() == PLAIN and turn["role"] in ROLES:
        content, asis = turn["content"], turn["role"] != "assistant" or not cut
        if asis and isinstance(content, str) and content.strip():
            return turn  # the fast path for most messages
    where = f"{row}, message {number}"
    if not isinstance(turn, dict):
        raise BadRow(
            "malformed",
            "a message must be a mapping",
            where,
            short(turn),
            fix="write one list of messages, not a list of lists" if isinstance(turn, list) else "",
        )
    named = role_of(turn)
    role = roles.get(str(named), named)
    if named is None:
        raise BadRow(
            "malformed",
            "a message has no role",
            where,
            ", ".join(map(str, turn)),
            expected="role and content, or from and value",
        )
    if role not in ROLES:
        bad = BadRow("malformed", "unknown role", where, short(named), expected=" or ".join(ROLES))
        bad.roles = (str(named),)
        raise bad
    message: Message = {"role": role}
    _check_roles(turn, roles, where)
    check_alike(turn, where, ("content", "value"), CALLS)
    content, calls = content_of(turn), tool_calls.listed(chosen(turn, *CALLS), where)
    if isinstance(content, list):
        content, reasoning, more = _parts(content, where)
        calls = [*calls, *more]  # a new list, because the other one belongs to the row
        if reasoning:
            message["reasoning_content"] = reasoning
    if named == "function_call":
        _check_one_place(calls, where)
        content, calls = "", tool_calls.listed(content, where) or [content]
    for key in filter(turn.get, BESIDE):
        if not isinstance(turn[key], str):
            raise BadRow("malformed", f"`{key}` must be a string", where, found=short(turn[key]))
        message[key] = turn[key]
    if calls:
        message["tool_calls"] = [tool_calls.normalized(call, where) for call in calls]
        content = content or ""
    if not isinstance(content, str):
        raise BadRow("malformed", "`content` must be a string", where, found=short(content))
    if role == "assistant" and cut:
        content = _without_reasoning(content, where)
        message = {key: part for key, part in message.items() if key not in REASONING_KEYS}
    if not content.strip() and not calls and role in ("user", "assistant"):
        raise BadRow("malformed", "`content` is empty", where)
    return {**message, "content": content}


def _check_one_place(calls: list[Any], where: str) -> None:
    """Check that a message with the role function_call, whose text is a call, has no others."""
    if calls:
        raise BadRow(
            "malformed",
            "a message with the role function_call has tool calls in two places",
            where,
            found=short(calls[0]),
            fix="keep the calls in `value` alone, or change the role to gpt",
        )


def _check_roles(turn: dict[str, Any], roles: dict[str, str], where: str) -> None:
    """Check that `role` and `from` name the same role, if a message has both."""
    named = {
        roles.get(str(turn[key]), turn[key]) for key in ("role", "from") if isinstance(turn.get(key), str)
    }
    if len(named & {*ROLES}) > 1:
        raise BadRow(
            "malformed",
            "a message has two roles",
            where,
            f"role: {turn['role']}, from: {turn['from']}",
            fix="keep the key of one format in each message",
        )


def _without_reasoning(content: str, where: str) -> str:
    """Remove the reasoning between `<think>` and `</think>` from an answer."""
    content = THINKING.sub("", content) if "</think>" in content else content
    if content.lstrip().startswith("<think>"):
        raise BadRow(
            "malformed",
            "`reasoning: cut` needs the end of the reasoning",
            where,
            found=short(content),
            fix="add `</think>` to the message",
        )
    return content


def _parts(parts: list[Any], where: str) -> tuple[str, str, list[Any]]:
    """Return text, reasoning and tool calls of a content that is a list of parts."""
    found: dict[str, list[Any]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        kind = str(part.get("type")) if isinstance(part, dict) else "text"
        if kind in ANTHROPIC:
            kind, part = _of_anthropic(part)
        if kind not in found:
            raise BadRow(
                "malformed",
                "unknown type of a content part",
                where,
                found=short(kind),
                expected=" or ".join((*found, *ANTHROPIC)),
            )
        if isinstance(part, dict):
            check_alike(part, where, ("text", "value"))
        found[kind].append(text_of(part) if isinstance(part, dict) else part)
    if not all(isinstance(text, str) for text in found["text"] + found["reasoning"]):
        raise BadRow("malformed", "`content` must be a string", where, found=short(parts))
    return "".join(found["text"]), "\n".join(found["reasoning"]), found["tool_call"]


def _of_anthropic(part: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the type and the value of a part that Anthropic's API names otherwise."""
    if part["type"] == "thinking":
        return "reasoning", {"value": part.get("thinking")}
    call = {"name": part.get("name"), "arguments": part.get("input")}
    return "tool_call", {"value": {**call, **({"id": part["id"]} if part.get("id") else {})}}


def separate_results(turns: list[Any]) -> list[Any]:
    """Return the messages with each tool result of Anthropic's user messages as a message of its own."""
    found = []
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        parts = content if isinstance(content, list) else []
        results = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_result"]
        for part in results:
            call = {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") else {}
            found.append({"role": "tool", "content": part.get("content") or "", **call})
        rest = [part for part in parts if part not in results]
        if not results:
            found.append(turn)
        elif rest:
            found.append({**turn, "content": rest})
    return found


def _blank_system(message: Message) -> bool:
    return message["role"] == "system" and not message["content"].strip()


def _weights(turn: dict[str, Any], message: Message, where: str, is_prompt: bool) -> TurnWeights:
    """Return the weights of an assistant message, as it is in the row."""
    if is_prompt:
        return NO_LOSS
    if turn.keys() == PLAIN and isinstance(turn["content"], str):
        return FULL_LOSS
    return message_weights.of_answer(turn, message["content"], where)


def _check_order(messages: list[Message], where: str) -> None:
    """Raise BadRow unless the roles follow `system? (user assistant (tool+ assistant)*)+`."""
    roles = [message["role"] for message in messages]
    after = {
        "": ("system", "user"),
        "system": ("user",),
        "user": ("assistant",),
        "assistant": ("user", "tool"),
        "tool": ("tool", "assistant"),
    }
    shown = ", ".join(roles)
    for before, role in zip(["", *roles], roles, strict=False):
        if role not in after[before]:
            raise BadRow(
                "role_order",
                (
                    f"the role {role} is not allowed "
                    + (f"after {before}" if before else "in the first message")
                ),
                where,
                found=shown,
                expected="user and assistant in turn, after at most one system message",
            )
    if roles[-1:] != ["assistant"]:
        raise BadRow("unanswered", "the last message is not from the assistant", where, found=shown)
