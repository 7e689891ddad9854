"""The Go template of a Modelfile writes chats as the Jinja template does."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from finetune.core.errors import UserError
from finetune.data.chat_templates import bundled
from finetune.export import ollama_export
from support import exports
from support.chat_tokenizers import tokenizer_with

SYSTEM = {"role": "system", "content": "Be short."}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Who  came?"},
    {"role": "assistant", "content": "Maria did."},
    {"role": "user", "content": "And who left?\n"},
]


def rendered(tokenizer: Any, messages: list[dict[str, Any]], opens: bool = False) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return text.removeprefix(tokenizer.bos_token) if opens else text


@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma", "spm"])
def test_parts_of_a_template_write_chats_as_the_template_does(kind: str) -> None:
    tokenizer = exports.tokenizer_of(kind)
    opens = tokenizer.bos_token is not None
    parts = ollama_export.parts_of(tokenizer, opens)
    chats = [CHAT, CHAT[:1]] + ([[SYSTEM, *CHAT]] if "system" in parts.around else [])
    for chat in chats:
        assert parts.render(chat) == rendered(tokenizer, chat, opens)


def test_parts_of_keeps_a_default_system_message_for_chats_without_one() -> None:
    tokenizer = tokenizer_with()
    default = (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nDefault.<|im_end|>\n' }}{% endif %}"
    )
    tokenizer.chat_template = default + exports.CHATML
    parts = ollama_export.parts_of(tokenizer, False)
    assert not parts.head_with_system and "{{ if .System }}{{ else }}" in parts.go()
    for chat in (CHAT, [SYSTEM, *CHAT]):
        assert parts.render(chat) == rendered(tokenizer, chat)


def test_go_template_of_chatml() -> None:
    assert ollama_export.parts_of(exports.tokenizer_of("chatml"), False).go() == (
        '{{ range .Messages }}{{ if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        "{{ end }}{{ end }}<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", list(bundled()))
def test_each_bundled_template_is_written_exactly_or_refused(name: str) -> None:
    tokenizer = tokenizer_with(bundled()[name])
    try:
        parts = ollama_export.parts_of(tokenizer, False)
    except UserError as error:
        assert "can't write this chat template" in error.problems[0].what
        return
    assert parts.render(CHAT[:1]) == rendered(tokenizer, CHAT[:1])


def test_render_knows_no_tool_calls() -> None:
    parts = ollama_export.parts_of(exports.tokenizer_of("chatml"), False)
    call: Any = {"role": "assistant", "content": "", "tool_calls": []}
    assert parts.render([CHAT[0], call]) is None and parts.render([{"role": "tool", "content": "1"}]) is None


def test_parts_of_refuses_a_template_that_numbers_its_turns() -> None:
    tokenizer = tokenizer_with()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ loop.index ~ message['role'] + message['content'] }}{% endfor %}"
    )
    with pytest.raises(UserError, match="can't write this chat template for Ollama"):
        ollama_export.parts_of(tokenizer, False)


@pytest.mark.parametrize("text", ['"', '"""', "{", "{{ .Env }}"])
def test_parts_of_refuses_text_that_would_end_the_template_or_a_part(text: str) -> None:
    """As the first and last text of the template, and before the content of a turn."""
    turn = "{% for m in messages %}<{{ m.role }}>" + f"{{{{ {text!r} }}}}"
    turn += "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>"
    with pytest.raises(UserError, match="characters that end a Go template"):
        ollama_export.parts_of(tokenizer_with(turn + f"{{{{ {text!r} }}}}{{% endif %}}"), opens=False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("", []),
        ("{% set messages = messages[1:] if messages[0].role == 'system' else messages %}", ["system"]),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", ["system"]),
        ("trim", ["spaces"]),
        ("last", ["reasoning"]),
    ],
)
def test_differences_names_chats_that_no_validation_chat_shows(change: str, expected: list[str]) -> None:
    template = exports.CHATML
    assert "message['content']" in template
    if change == "trim":
        template = template.replace("message['content']", "message['content'] | trim")
    elif change == "last":
        template = template.replace("message['content']", "message['content'].split('</think>\n\n')[-1]")
    else:
        template = change + template
    tokenizer = tokenizer_with(template)
    parts = ollama_export.parts_of(tokenizer, opens=False)
    found = ollama_export.differences(parts, tokenizer, opens=False)
    assert len(found) == len(expected)
    assert all(word in text for word, text in zip(expected, found, strict=True))


@pytest.mark.parametrize("name", list(bundled()))
def test_bundled_template_that_is_written_differently_is_named(name: str) -> None:
    """A chat that no note names is written as the tokenizer's template writes it."""
    tokenizer = tokenizer_with(bundled()[name])
    try:
        parts = ollama_export.parts_of(tokenizer, opens=False)
    except UserError:
        return
    notes = " ".join(ollama_export.differences(parts, tokenizer, opens=False))
    chats = {
        "system": [SYSTEM, CHAT[0]],
        "several turns": [*CHAT[:2], {"role": "user", "content": "Why?"}],
        "spaces": [CHAT[2]],
        "reasoning": [CHAT[0], {"role": "assistant", "content": "<think>\nso\n</think>\n\nyes"}, CHAT[0]],
    }
    for word, chat in chats.items():
        try:
            same = parts.render(chat) == rendered(tokenizer, chat)
        except TemplateError:  # the template refuses the chat
            same = False
        assert same or word in notes, (word, notes)
