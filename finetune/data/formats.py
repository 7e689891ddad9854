"""Rows of every known format as one thing, an `Example`: a chat, a prompt with its completion, or plain text.

messages            {"messages": [{"role", "content"}]}, also under `conversations`; a content may be in parts
prompt_completion   {"prompt", "completion"}: texts, or two lists of messages
alpaca              {"instruction", "input", "output"}
sharegpt            {"conversations": [{"from", "value"}]}
text                {"text"}

`tools` and `system` columns are used where there are any. A row that is none of these is a `BadRow`.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.data import guess
from finetune.errors import Problem, UserError, nearest

if TYPE_CHECKING:
    from finetune.sections import Data

ROLES = ("system", "user", "assistant", "tool")
COLUMNS = {  # the columns of each format, in the order in which formats are recognised
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = ("input", "system", "tools")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
THINKING = re.compile(r"(?:<think>|\A)(?:(?!<think>).)*?</think>\s*", re.DOTALL)
"""A prompt may have begun it: then the answer has only its end."""
PLAIN = {"role", "content"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
BESIDE = ("name", "tool_call_id", *REASONING_KEYS)  # kept of a message, beside its role, content and calls

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    value: dict[str, Any]
    where: str  # file:line, or name[index]

    def digest(self, seed: int, data: Data) -> int:
        """64 bits that tell rows apart by the columns that are read, shuffled by `seed`."""
        read = {*(column for needed in COLUMNS.values() for column in needed), *OPTIONAL}
        read |= set(data.columns.values())
        content = json.dumps({k: self.value[k] for k in self.value if k in read}, sort_keys=True, default=str)
        hashed = hashlib.blake2b(content.encode(), digest_size=8, salt=seed.to_bytes(8))
        return int.from_bytes(hashed.digest())


class BadRow(Exception):
    """A row that can't be trained on: what it is counted as, and what to say of it."""

    roles: tuple[str, ...] = ()
    """Roles of its messages that are not known."""
    format: str = ""
    """The one it has, where that is not its source's."""

    def __init__(self, kind: str, what: str, where: str, found: str = "", **texts: str) -> None:
        super().__init__(what)
        self.kind = kind  # unreadable | malformed | role_order | unanswered
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in found)  # else a terminal obeys it
        self.problem = Problem(what, where=where, found=shown, **texts)


@dataclass(frozen=True, slots=True)
class Example:
    """What one row says, whatever it looked like."""

    where: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    trained: tuple[bool, ...] = ()
    """For each of the assistant's messages, whether the row lets it carry loss."""
    prompt: str | None = None
    completion: str = ""
    """The answer to `prompt`; without one, a text all of which is trained on."""

    @property
    def answer(self) -> str:
        """What the model should say last."""
        return self.messages[-1]["content"] if self.messages else self.completion

    def characters(self) -> int:
        """About how long it is."""
        return (
            sum(len(m["content"]) for m in self.messages or ())
            + len(self.prompt or "")
            + len(self.completion)
        )

    def digest(self) -> int:
        """64 bits that tell examples apart by content."""
        said = [f"{turn['role']}\x1f{turn['content']}" for turn in self.messages or ()]
        more = [self.tools, *(turn for turn in self.messages or () if len(turn) > 2)]
        said += [json.dumps(more, sort_keys=True)] if any(more) else []
        content = "\x1e".join([*said, self.prompt or "", self.completion])
        return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def detect(row: Row, data: Data) -> str:
    """The format the recipe names, or the one whose columns the row has (exit 2 if none)."""
    _check_columns(row, data)
    if data.format != "auto":
        return data.format
    value = _renamed(row, data)
    if seen := _seen(value):
        return seen
    expected = "messages | conversations | prompt, completion | instruction, output | text"
    more, fix = guess.columns([str(name) for name in value], value, row.where.rpartition(":")[0])
    found, what = ", ".join(map(str, value)), f"no columns to train on{more}"
    raise UserError(Problem(what, "data.columns", row.where, found, expected, fix))


def _seen(value: dict[str, Any]) -> str:
    """The format whose columns these are, or the empty string."""
    for name, needed in COLUMNS.items():
        if all(column in value for column in needed):
            turns = value.get("conversations") if name == "sharegpt" else None
            plain = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]
            return "messages" if plain else name
    return ""


def of_another_format(bad: BadRow, row: Row, data: Data, format: str) -> BadRow:
    """What is wrong with a row that can't be read as `format`: perhaps that it has another one."""
    value = {name: part for name, part in _renamed(row, data).items() if part is not None}
    seen, chats = _seen(value), ("messages", "sharegpt")
    if {seen, format} == set(chats):  # either may stand under either name; roles tell them apart
        another = bool(bad.roles) and seen == "sharegpt"
    else:
        another = bool(seen) and any(column not in value for column in COLUMNS[format])
    if not another or seen == format:
        return bad
    other = BadRow("malformed", "a row of another format", row.where, f"{seen}, not {format}")
    other.format = seen
    return other


def unused(row: Row, data: Data, format: str) -> list[str]:
    """Columns of a row that nothing is made of."""
    value = _renamed(row, data)
    plain = format == "text" or _asked_plainly(value, format)
    optional = () if plain else ("system", "tools", *(("input",) if format == "alpaca" else ()))
    either = ("messages", "conversations") if format in ("messages", "sharegpt") else ()
    return sorted(set(map(str, value)) - {*COLUMNS[format], *optional, *either})


def _asked_plainly(value: dict[str, Any], format: str) -> bool:
    """Whether prompt and completion are texts, with no place for a system message or tools."""
    return format == "prompt_completion" and isinstance(value.get("prompt"), str)


def convert(row: Row, data: Data, format: str) -> Example:
    """One row as an example.

    Raises:
        BadRow: what the row lacks.
    """
    value = _renamed(row, data)
    if format == "text":
        return Example(row.where, completion=_text(value, "text", row))
    if _asked_plainly(value, format):
        prompt = _text(value, "prompt", row, empty=True)
        return Example(row.where, prompt=prompt, completion=_text(value, "completion", row))
    roles = {**(SHAREGPT_ROLES if format == "sharegpt" else {}), **data.role_map}
    turns = _turns(value, format, data, row)
    begins = _named(turns[0]) if isinstance(turns[0], dict) else None
    if value.get("system") and roles.get(str(begins), begins) != "system":
        turns.insert(0, {"role": "system", "content": value["system"]})
    try:
        messages = [_message(turn, number, roles, data, row) for number, turn in enumerate(turns)]
    except BadRow as bad:
        raise _with_all_roles(bad, turns, roles) from None
    both = [(m, turn) for m, turn in zip(messages, turns, strict=True) if not _blank_system(m)]
    messages = [message for message, _ in both]
    _check_order(messages, row)
    trained = tuple(_wanted(turn, row) for message, turn in both if message["role"] == "assistant")
    return Example(row.where, messages, _tools(value.get("tools"), row), trained)


def _turns(value: dict[str, Any], format: str, data: Data, row: Row) -> list[Any]:
    """The messages of a row, as they stand there."""
    if format == "alpaca":
        asked = _text(value, "instruction", row)
        more = _text(value, "input", row, empty=True) if value.get("input") is not None else ""
        content = f"{asked}\n\n{more}" if more.strip() else asked
        answer = _text(value, "output", row)
        return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    if format == "prompt_completion":
        given, answer = _list(value, "prompt", row), _list(value, "completion", row)
        if data.train_on != "all":
            given = [{**turn, "train": False} if isinstance(turn, dict) else turn for turn in given]
        return [*given, *answer]
    chats = "conversations" not in value and format != "sharegpt"
    return list(_list(value, "messages" if chats or "messages" in value else "conversations", row))


def _renamed(row: Row, data: Data) -> dict[str, Any]:
    """The row under our column names."""
    if not data.columns:
        return row.value
    renamed = {ours: row.value.get(theirs) for ours, theirs in data.columns.items()}
    return {**{k: v for k, v in row.value.items() if k not in data.columns.values()}, **renamed}


def _check_columns(row: Row, data: Data) -> None:
    """`columns:` must fit the first row."""
    known = {column for needed in COLUMNS.values() for column in needed} | set(OPTIONAL)
    problems = []
    for ours, theirs in data.columns.items():
        if ours not in known:
            what, expected = "no such column here", ", ".join(sorted(known))
            fix = nearest(ours, known)
            problems.append(Problem(what, f"data.columns.{ours}", expected=expected, fix=fix))
        elif theirs not in row.value and ours not in OPTIONAL:
            found, fix = ", ".join(map(str, row.value)), nearest(theirs, row.value)
            what = f'the row has no column "{theirs}"'
            problems.append(Problem(what, f"data.columns.{ours}", row.where, found, fix=fix))
    if problems:
        raise UserError(*problems)


def _text(value: dict[str, Any], column: str, row: Row, empty: bool = False) -> str:
    text = value.get(column)
    if not isinstance(text, str):
        fix = f'write it as text: "{text}"' if type(text) in (int, float) and text == text else ""
        raise BadRow("malformed", f"{column} must be text", row.where, _short(text), fix=fix)
    if not (empty or text.strip()):
        raise BadRow("malformed", f"{column} is empty", row.where)
    return text


def _list(value: dict[str, Any], column: str, row: Row) -> list[Any]:
    turns = value.get(column)
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # a column of a csv file
        turns = _json(turns, column, row.where)
    if not isinstance(turns, list) or not turns:
        kinds = "text or a list of messages" if column == "prompt" else "a list of messages"
        raise BadRow("malformed", f"{column} must be {kinds}", row.where, found=_short(turns))
    return turns


def _with_all_roles(bad: BadRow, turns: list[Any], roles: dict[str, str]) -> BadRow:
    """Of a row with a role that is not known, all of them at once."""
    if not bad.roles:
        return bad
    named = [_named(turn) for turn in turns if isinstance(turn, dict)]
    unknown = [str(name) for name in named if name is not None and roles.get(str(name), name) not in ROLES]
    bad.roles, said = tuple(dict.fromkeys(unknown)), bad.problem
    found, fix = ", ".join(map(_short, bad.roles)), guess.role_map(bad.roles)
    more = BadRow(bad.kind, said.what, said.where, found, expected=said.expected, fix=fix)
    more.roles = bad.roles
    return more


def _named(turn: dict[str, Any]) -> Any:
    return turn.get("role", turn.get("from"))


def _message(turn: Any, number: int, roles: dict[str, str], data: Data, row: Row) -> Message:
    """One message with a known role and one text, its reasoning and tool calls beside it."""
    if not roles and isinstance(turn, dict) and turn.keys() == PLAIN and turn["role"] in ROLES:
        content, asis = turn["content"], turn["role"] != "assistant" or data.reasoning == "keep"
        if asis and isinstance(content, str) and content.strip():
            return turn  # nearly all there is
    where = f"{row.where}, message {number}"
    if not isinstance(turn, dict):
        fix = "one list of messages, not a list of such lists" if isinstance(turn, list) else ""
        raise BadRow("malformed", "a message must be a mapping", where, _short(turn), fix=fix)
    named = _named(turn)
    role = roles.get(str(named), named)
    if named is None:
        what, found = "a message has no role", ", ".join(map(str, turn))
        raise BadRow("malformed", what, where, found, expected="role and content, or from and value")
    if role not in ROLES:
        bad = BadRow("malformed", "no such role", where, _short(named), expected=", ".join(ROLES))
        bad.roles = (str(named),)
        raise bad
    message: Message = {"role": role}
    content = turn.get("content", turn.get("value"))
    calls = [*_calls(turn.get("tool_calls"), where), *_calls(turn.get("function_call"), where)]
    if isinstance(content, list):
        content, reasoning, more = _parts(content, where)
        calls += more
        if reasoning:
            message["reasoning_content"] = reasoning
    if named == "function_call":
        content, calls = "", _calls(content, where) or [content]
    for key in BESIDE:
        if turn.get(key):
            if not isinstance(turn[key], str):
                raise BadRow("malformed", f"{key} must be text", where, found=_short(turn[key]))
            message[key] = turn[key]
    if calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
        content = content or ""
    if not isinstance(content, str):
        raise BadRow("malformed", "content must be text", where, found=_short(content))
    if role == "assistant" and data.reasoning == "cut":
        content = THINKING.sub("", content) if "</think>" in content else content
        if content.lstrip().startswith("<think>"):
            raise BadRow("malformed", "reasoning without an end can't be cut", where, found=_short(content))
        message = {key: part for key, part in message.items() if key not in REASONING_KEYS}
    if not content.strip() and not calls and role in ("user", "assistant"):
        raise BadRow("malformed", "content is empty", where)
    return {**message, "content": content}


def _parts(parts: list[Any], where: str) -> tuple[str, str, list[Any]]:
    """Text, reasoning and tool calls of a content given in parts."""
    found: dict[str, list[Any]] = {"text": [], "reasoning": [], "tool_call": []}
    for part in parts:
        kind = str(part.get("type")) if isinstance(part, dict) else "text"
        if kind not in found:
            what, expected = "no such part of a content", ", ".join(found)
            raise BadRow("malformed", what, where, found=_short(kind), expected=expected)
        found[kind].append(part.get("text", part.get("value")) if isinstance(part, dict) else part)
    if not all(isinstance(text, str) for text in found["text"] + found["reasoning"]):
        raise BadRow("malformed", "content must be text", where, found=_short(parts))
    return "".join(found["text"]), "\n".join(found["reasoning"]), found["tool_call"]


def _calls(calls: Any, where: str) -> list[Any]:
    """The tool calls of a message: none, one or a list, each or all as JSON text too."""
    if isinstance(calls, str) and calls.strip():
        calls = _json(calls, "a tool call", where)
    return calls if isinstance(calls, list) else [calls] if calls else []


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name", "arguments": a mapping}}, as templates expect it."""
    call = _json(call, "a tool call", where)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("malformed", "a tool call needs a name", where, found=_short(call))
    arguments = function.get("arguments", function.get("parameters"))
    arguments = _json(arguments or {}, "a tool call's arguments", where) or {}
    if not isinstance(arguments, dict):
        what = "a tool call's arguments must be a mapping"
        raise BadRow("malformed", what, where, found=_short(arguments))
    more = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}, **more}


def _json(value: Any, what: str, where: str) -> Any:
    """What a value says that may be JSON text; in the end it must be something that JSON can say."""
    try:
        if not isinstance(value, str):
            json.dumps(value, allow_nan=False)
            return value
        found = json.loads(value, parse_constant=_no_constant)
        if "\\ud" in value.lower():  # one half of a surrogate pair is no character
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, TypeError, RecursionError):
        raise BadRow("malformed", f"{what} must be JSON", where, found=_short(value)) from None


def _no_constant(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _tools(tools: Any, row: Row) -> list[dict[str, Any]] | None:
    """The row's tools, each wrapped as templates expect it; a column may hold them as JSON text."""
    if not tools:
        return None
    tools = _json(tools, "tools", row.where)
    tools = [_json(tool, "tools", row.where) for tool in tools] if isinstance(tools, list) else tools
    good = isinstance(tools, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) for tool in tools
    )
    if not good:
        raise BadRow("malformed", "tools must be a list of mappings", row.where, found=_short(tools))
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools] or None


def _blank_system(message: Message) -> bool:
    return message["role"] == "system" and not message["content"].strip()


def _wanted(turn: Message, row: Row) -> bool:
    """A message's own `train` (true, false) or `weight` (1, 0)."""
    if turn.keys() == PLAIN:
        return True
    flag = next((turn[key] for key in ("train", "weight", "loss_weight") if turn.get(key) is not None), True)
    if flag not in (0, 1):
        what, expected = "a message is trained on or not", "true or false, 1 or 0"
        raise BadRow("malformed", what, row.where, found=_short(flag), expected=expected)
    return bool(flag)


def _check_order(messages: list[Message], row: Row) -> None:
    """system? (user assistant (tool+ assistant)*)*, the assistant last."""
    roles = [message["role"] for message in messages]
    after = {"": ("system", "user"), "system": ("user",), "user": ("assistant",)}
    after |= {"assistant": ("user", "tool"), "tool": ("tool", "assistant")}
    shown = ", ".join(roles)
    for before, role in zip(["", *roles], roles, strict=False):
        if role not in after[before]:
            what = f"roles out of order: the {role} " + (f"after the {before}" if before else "begins")
            expected = "user and assistant in turn, after at most one system message"
            raise BadRow("role_order", what, row.where, found=shown, expected=expected)
    if roles[-1:] != ["assistant"]:
        raise BadRow("unanswered", "the last message must be the assistant's", row.where, found=shown)


def _short(value: Any) -> str:
    return repr(value)[:60] if not isinstance(value, str) else value[:60]
