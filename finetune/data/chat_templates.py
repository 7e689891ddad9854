"""Chat templates by name, their marked variants, and the text that a template adds around a turn."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.core import regular_files
from finetune.core.errors import Problem, UserError, nearest
from finetune.data.messages import REASONING_KEYS
from finetune.data.template_sandbox import BROKEN, ChatTemplate, render

Tools = list[dict[str, Any]] | None

KEY = "data.chat_template"
A_TOOL = {"name": "qzlook", "description": "qz", "parameters": {"type": "object", "properties": {}}}


@cache
def bundled() -> dict[str, str]:
    """Return templates by name.

    They are TRL's templates with a marked variant, and finetune's templates for model families that TRL
    lacks.
    """
    names = {entry.name.removesuffix(".jinja") for entry in _trl().iterdir()}
    found = {
        name: (_trl() / f"{name}.jinja").read_text(encoding="utf-8")
        for name in names
        if f"{name}_training" in names
    }
    own = files("finetune.data") / "templates"
    found |= {entry.name.removesuffix(".jinja"): entry.read_text(encoding="utf-8") for entry in own.iterdir()}
    return dict(sorted(found.items()))


def reads_clock(template: str) -> bool:
    """Return whether a template calls `strftime_now`, the only way to read the time in transformers."""
    return "strftime_now" in template


def _trl() -> Path:
    """Return the folder of TRL's templates without importing TRL, which takes a third of a second."""
    spec = find_spec("trl")
    assert spec and spec.origin
    return Path(spec.origin).parent / "chat_templates"


def marked_twin(template: str) -> str | None:
    """Return TRL's variant of a template that marks the assistant's tokens, if TRL has one."""
    name = next((name for name, text in bundled().items() if text == template), None)
    twin = _trl() / f"{name}_training.jinja"
    return twin.read_text(encoding="utf-8") if name and twin.is_file() else None


def read_template(name: str) -> str:
    """Return a bundled template or the content of a file.

    Raises:
        UserError: the name is neither a bundled template nor a file, or it is both (exit 2).
    """
    path, known = Path(name), bundled()
    if path.is_file() and name in known:
        raise UserError(
            Problem(
                "the name means a bundled template and a file",
                KEY,
                found=name,
                fix=f"name the file ./{name}, or rename it for the bundled template",
                code="chat-template",
            )
        )
    if path.is_file():
        try:
            text = regular_files.read_text(path, "data.chat_template", "utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(
                Problem(
                    "the file is not UTF-8",
                    KEY,
                    found=name,
                    fix=f"iconv -f WINDOWS-1252 -t UTF-8 {name} > utf8.jinja",
                    code="chat-template",
                )
            ) from None
        if "{{" not in text and "{%" not in text:  # another file, whose text no message may show
            raise UserError(
                Problem(
                    "the file is not a Jinja template",
                    KEY,
                    found=name,
                    expected="a file with {{ ... }} or {% ... %}",
                    fix="data.chat_template: chatml, or name a Jinja file",
                    code="chat-template",
                )
            )
        return text
    if name not in known:
        near = nearest(name, known)
        raise UserError(
            Problem(
                "unknown chat template",
                KEY,
                found=name,
                expected="" if near else f"a Jinja file, or a bundled template: {', '.join(known)}",
                fix=f"chat_template: {near}" if near else "",
                code="chat-template",
            )
        )
    return known[name]


def other_prompt(own: ChatTemplate, template: ChatTemplate, tools: Tools) -> tuple[str, ...]:
    """Return a note if the prompt at inference, rendered with `own`, is not the start of the training text.

    Qwen 3 omits the reasoning of earlier turns at inference, but its marked variant keeps it.
    """
    turns = [{"role": role, "content": f"qz{i}"} for i, role in enumerate(("user", "assistant") * 2)]
    notes = []
    for count, which in ((1, "first"), (3, "second")):
        (prompt,) = render(own, [(turns[:count], tools)], prompt=True)
        (text,) = render(template, [(turns[: count + 1], tools)])
        if prompt.error and not text.error:
            raise UserError(
                Problem(
                    "the chat template can't render a prompt",
                    KEY,
                    found=prompt.error,
                    fix="data.chat_template: chatml",
                    code="chat-template",
                )
            )
        if not (prompt.error or text.error or text.text.startswith(prompt.text)):
            notes.append(
                f"the chat template writes the prompt of the {which} answer differently at inference"
            )
    return tuple(notes)


def look_at(template: ChatTemplate, ends: re.Pattern[str], tools: Tools) -> dict[str, Any]:
    """Render test chats to find the text that a template adds around a turn and the parts that it omits."""
    user, answer = {"role": "user", "content": "qzuser"}, {"role": "assistant", "content": "qzanswer"}
    (rendered,) = render(template, [([user], tools)])
    if rendered.error.startswith(BROKEN):
        raise UserError(
            Problem(
                "the chat template is not valid",
                KEY,
                found=rendered.error,
                fix="chat_template: chatml",
                code="chat-template",
            )
        )
    if not rendered.error and user["content"] not in rendered.text:
        raise UserError(
            Problem(
                "the chat template ignores the content of messages",
                KEY,
                found=rendered.text[:200],
                why="it may be a template for images",
                fix="data.chat_template: chatml",
                code="chat-template",
            )
        )
    (with_prompt,) = render(template, [([user], tools)], prompt=True)
    call = {
        "id": "callqz001",
        "type": "function",
        "function": {"name": "qzname", "arguments": {"qzkey": "qzcall"}},
    }
    result = {"role": "tool", "content": "qzresult", "tool_call_id": call["id"]}
    called = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result, answer]
    told = [{"role": "system", "content": "qzsystem"}, user, answer]
    thought = [user, {**answer, "reasoning_content": "qzthought"}]
    chats: list[Any] = [(messages, tools) for messages in ([user, answer], told, called, thought)]
    plain, system, calls, reasoning = render(template, chats)
    shown = [
        ("system", "qzsystem", system),
        ("tool_calls", "qzcall", calls),
        ("tool", "qzresult", calls),
        *((key, "qzthought", reasoning) for key in REASONING_KEYS),
    ]
    tail = plain.text.rpartition(answer["content"])[2]
    end = ends.search(tail)
    added = rendered.text and with_prompt.text.startswith(rendered.text)
    return {
        "prompt_end": with_prompt.text.removeprefix(rendered.text) if added else "",
        "after_turn": tail[end.end() :] if end else "",
        "leaves_out": frozenset(kind for kind, word, at in shown if not at.error and word not in at.text),
    }
