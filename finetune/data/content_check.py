"""Find each part of an example in its rendered text: contents, reasoning, tool calls and tools.

A chat template is a program, and can omit parts that it does not support. It can strip whitespace and choose
how to write a value (JSON, escapes). Every other loss raises an error.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from finetune.data.examples import BadRow, Example, Message, short
from finetune.data.messages import REASONING_KEYS, THINKING
from finetune.data.template_sandbox import joined

# Message number of a part that a template can place anywhere
ANYWHERE = -1
# In characters. The template itself can contain a shorter text by chance.
SHORT = 24
MARKER = re.compile(r"qzpart\d+qz")
# Character comparisons that take less than a moment
LONG = 20_000_000
NAMES = {  # kind of part -> its name in errors
    "system": "system messages",
    "user": "content of the user",
    "assistant": "content of the assistant",
    "tool": "results of tools",
    "reasoning": "reasoning",
    "call": "tool calls",
    "argument": "arguments of tool calls",
    "tools": "tools",
    "name": "names of speakers",
}
LOST = "the model would be trained on an incomplete example"
# Kinds that a template can omit. It can omit reasoning only in earlier turns.
OPTIONAL = ("name", "reasoning")
# The search for missing parts of a kind ends after so many, because each takes a search of the whole text
ENOUGH = 10


class Part(NamedTuple):
    """One text of an example that must appear in the rendered text."""

    kind: str
    """A key of NAMES."""
    text: str
    message: int
    """The index of its message, or ANYWHERE."""


def parts(example: Example) -> list[Part]:
    """Return every part of a chat, in order.

    The system message and the tools can appear anywhere in the text.
    """
    found = []
    for number, message in enumerate(example.messages or ()):
        role, content = message["role"], message["content"]
        place = ANYWHERE if role == "system" else number
        if role == "assistant" and (len(message) > 2 or "</think>" in content):
            thoughts, content = _reasoning(message)
            found += [Part("reasoning", text, number) for text in thoughts if text]
        if role != "tool" and (name := str(message.get("name") or "").strip()):
            found.append(Part("name", name, place))
        if content := content.strip():
            found.append(Part(role, content, place))
        for call in message.get("tool_calls") or ():
            found.append(Part("call", call["function"]["name"], number))
            found += [Part("argument", text, number) for text in _leaves(call["function"]["arguments"])]
    for tool in example.tools or ():
        found += [Part("tools", text, ANYWHERE) for text in _of_tool(tool["function"])]
    return found


def find_missing(parts: list[Part], text: str) -> list[Part]:
    """Return the parts that a rendered text lacks. The other parts appear in the order of their messages."""
    position = after_tools = 0
    for part in parts:
        first = 0 if part.message == ANYWHERE else position
        said = part.text
        at = text.find(said, after_tools) if part.kind == "tools" else -1  # templates write tools in order
        at = text.find(said, first) if at < 0 else at
        if at < 0:
            said = json.dumps(said, ensure_ascii=False)[1:-1]
            at = text.find(said, first)
        if at < 0:
            return _search(parts, "".join(text.split()))
        if part.message != ANYWHERE:
            position = at + len(said)
        elif part.kind == "tools":
            after_tools = at
    return []


def misplaced(example: Example, text: str, spans: list[list[int]]) -> Part | None:
    """Return a part on the wrong side of the template's marks, or `None`.

    Answers that are trained on must be in the marks with their tool calls. All other parts must be outside.
    Reasoning can begin before the marks.

    Args:
        spans: the character range [start, end) of each marked part.
    """
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(text)]
    outside = "\0".join(text[start:end] for start, end in zip(starts, ends, strict=True))
    marked = "\0".join(text[start:end] for start, end in joined(spans))
    answers = [n for n, message in enumerate(example.messages or ()) if message["role"] == "assistant"]
    trained = {n for n, is_trained in zip(answers, example.trained, strict=True) if is_trained}
    needed = [part for part in parts(example) if part.kind not in OPTIONAL]
    others = {*range(len(example.messages or ())), ANYWHERE}.difference(answers)
    wrong = find_missing([part for part in needed if part.message in others], outside)
    wrong = wrong or find_missing([part for part in needed if part.message in trained], marked)
    return wrong[0] if wrong else None


def doubtful(parts: list[Part], text: str) -> list[Part]:
    """Return the short parts that the template itself may have written. Their loss would go unnoticed."""
    brief = [part for part in parts if len(part.text) < SHORT and part.kind not in ("argument", "tools")]
    if len(brief) * len(text) > LONG:
        # Rendering the example again is faster than counting each part.
        return brief
    said = "\0".join(part.text for part in parts)
    words = dict.fromkeys(part.text for part in brief)
    often = {word for word in words if text.count(word) > said.count(word)}
    return [part for part in brief if part.text in often]


def with_markers(example: Example, doubts: list[Part]) -> tuple[Example, list[str]]:
    """Replace each doubtful part by a marker that no template writes. Return the example and the markers."""
    messages, markers = [_copy(message) for message in example.messages or ()], list[str]()
    for number, part in enumerate(doubts):
        marker = f"qzpart{number}qz"
        is_marked = _put_marker(
            messages[max(part.message, 0)], part, marker
        )  # the system message has index 0
        markers.append(marker if is_marked else "")
    return replace(example, messages=messages), markers


def _copy(message: Message) -> Message:
    """Return a copy of a message whose values and tool calls can be replaced."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(calls)} if calls else dict(message)


def _put_marker(message: Message, part: Part, marker: str) -> bool:
    """Put the marker in place of one part of the message. Return whether the part is unique."""
    if part.kind == "call":
        calls = message["tool_calls"]
        named = (index for index, call in enumerate(calls) if call["function"]["name"] == part.text)
        if (index := next(named, None)) is not None:
            call = calls[index]
            calls[index] = {**call, "function": {**call["function"], "name": marker}}
        return index is not None
    for key in ("name",) if part.kind == "name" else ("content", *REASONING_KEYS):
        if message.get(key) and message[key].count(part.text) == 1:
            message[key] = message[key].replace(part.text, marker)
            return True
    return False


def refuse(example: Example, missing: list[Part]) -> Part:
    """Raise an error for a missing part, unless the template is allowed to omit it.

    Many templates omit the reasoning before the user's last message on purpose, as at inference. Most
    templates have no place for the names of speakers.

    Returns:
        The first missing part, if the template is allowed to omit all missing parts.

    Raises:
        BadRow: the template must not omit a missing part.
    """
    messages = example.messages or ()
    last_user_turn = max(
        (number for number, message in enumerate(messages) if message["role"] == "user"), default=0
    )
    for part in missing:
        if part.kind not in OPTIONAL or (part.kind == "reasoning" and part.message > last_user_turn):
            where = example.where + (f", message {part.message}" if part.message >= 0 else "")
            fix = "data.chat_template: qwen3"
            raise BadRow(
                "malformed",
                f"the chat template ignores {NAMES[part.kind]}",
                where,
                short(part.text),
                fix=f"reasoning: cut, or {fix}" if part.kind == "reasoning" else fix,
                why=LOST,
                code="data-lost",
            )
    return missing[0]


def _reasoning(message: Message) -> tuple[list[str], str]:
    """Split an assistant's message into its reasoning and its other text."""
    thoughts = [str(message[key]).strip() for key in REASONING_KEYS if message.get(key)]
    content = message["content"]
    if "</think>" in content:
        inside = [
            found[0].replace("<think>", "").replace("</think>", "") for found in THINKING.finditer(content)
        ]
        thoughts = [text.strip() for text in inside] + thoughts
        content = THINKING.sub("", content)
    return list(dict.fromkeys(thoughts)), content


def _leaves(value: object) -> Iterator[str]:
    """Yield each name and each value in a tool call's arguments, as text."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name).strip()
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        if value.strip():
            yield value.strip()
    elif value is not None:
        yield json.dumps(value)


def _of_tool(function: dict[str, Any]) -> list[str]:
    """Return the name and the description of a tool, which the model must see."""
    told = [function.get("name"), function.get("description")]
    return [text.strip() for text in told if isinstance(text, str) and text.strip()]


def _search(parts: list[Part], text: str) -> list[Part]:
    """Return the parts that a text without whitespace lacks. Each part must be between its neighbors.

    The search places long parts first. A short part inside a longer part does not count. If two messages have
    the same reasoning, the search places it last, because a template can omit the first and keep the second.
    After ENOUGH missing parts of a kind, the search skips this kind. Parts after the last user message count
    as another kind, because a template must not omit the reasoning there.
    """
    last_user_turn = max((part.message for part in parts if part.kind == "user"), default=0)
    often = Counter(part.text for part in parts if part.kind == "reasoning")
    # (message, start, end) of each part found. Both orders agree, because the messages are rendered in order.
    placed: list[tuple[int, int, int]] = []
    missing, lost = list[int](), Counter[tuple[str, bool]]()

    def order(number: int) -> tuple[bool, bool, int]:
        part = parts[number]
        twice = part.kind == "reasoning" and often[part.text] > 1
        return part.message == ANYWHERE, twice, -len("".join(part.text.split()))

    for number in sorted(range(len(parts)), key=order):
        part = parts[number]
        kind = part.kind, part.message > last_user_turn
        if lost[kind] >= ENOUGH:
            continue
        if part.message == ANYWHERE:
            first, after, low, high = 0, len(placed), 0, len(text)
        else:
            first = bisect_left(placed, (part.message, -1, -1))
            after = bisect_right(placed, (part.message, len(text) + 1, 0))
            low = placed[first - 1][2] if first else 0
            high = placed[after][1] if after < len(placed) else len(text)
        others = placed[first:after]
        for form in _forms(part.text):
            start = _free_place(text, form, low, high, others)
            if start >= 0:
                if part.message != ANYWHERE:
                    spot = (part.message, start, start + len(form))
                    placed.insert(bisect_left(placed, spot), spot)
                break
        else:
            missing.append(number)
            lost[kind] += 1
    return [parts[number] for number in sorted(missing)]


def _free_place(text: str, form: str, low: int, high: int, others: list[tuple[int, int, int]]) -> int:
    """Return the first position of a form between `low` and `high` that no other part covers, or -1."""
    start = text.find(form, low, high)
    while start >= 0:
        end = start + len(form)
        index = bisect_left(others, end, key=lambda spot: spot[1])  # the last part that begins before `end`
        blocking = others[index - 1] if index else None
        if blocking is None or blocking[2] <= start:
            return start
        start = text.find(form, max(start + 1, blocking[2]), high)
    return -1


def _forms(text: str) -> Iterator[str]:
    """Yield the ways in which templates write a text, without whitespace."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    plain = (
        text,
        written,
        json.dumps(text)[1:-1],
        json.dumps(written, ensure_ascii=False)[1:-1],  # JSON inside a JSON string
        repr(text)[1:-1],  # Jinja's output for a mapping
        repr(text + "'\"")[1:-4],
        text.capitalize(),  # Python's spelling of true
    )
    yield from ("".join(form.split()) for form in plain)
    for form in plain:
        for quotes in ({"'": "&#39;", '"': "&#34;"}, {"'": "&#x27;", '"': "&quot;"}, {}):
            signs = {"&": "&amp;", "<": "&lt;", ">": "&gt;", **quotes}
            yield "".join(form.translate(str.maketrans(signs)).split())
    # The escapes of Jinja's tojson filter
    in_html = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}
    yield "".join(written.translate(str.maketrans(in_html)).split())
