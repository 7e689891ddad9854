"""Each part of an example is found in its rendering, or the example is an error."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.data import chat_templates, content_check, encoding
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert
from finetune.recipe.schema import Data
from support.chat_rows import ANSWER, USER
from support.chat_tokenizers import encoder_of, tokenizer_with

CHATML = """{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ BODY }}<|im_end|>{% endgeneration %}
{%- else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALLS = "m.tool_calls | map(attribute='function') | map('tojson') | join"
ALL = f"m.content ~ ({CALLS} if m.tool_calls)"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("weather", "clock")
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "callid001", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, content: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def said(role: str, content: str, **more: str) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def encoded(template: str, *messages: Any, tools: Any = None) -> encoding.Encoded | BadRow:
    chat: Example = convert(
        Row({"messages": list(messages), "tools": tools}, "a:1"), Data(name="-"), "messages"
    )
    (found,) = encoder_of(tokenizer_with(template))([chat])
    return found


def refused(template: str, *messages: Any, tools: Any = None) -> str:
    found = encoded(template, *messages, tools=tools)
    assert isinstance(found, BadRow), "nothing was missed"
    what = found.problem.what.removeprefix("the chat template ignores ")
    return f"{what}: {found.problem.found} ({found.problem.where})"


@pytest.mark.parametrize(
    ("body", "messages", "missed"),
    [
        (
            "m.content.split('</think>')[-1]",
            [USER, said("assistant", "<think>two and three</think>5")],
            "reasoning: two and three (a:1, message 1)",
        ),
        (
            "m.content",
            [USER, said("assistant", "5", reasoning_content="two and three")],
            "reasoning:  (a:1)",
        ),
        (
            "(m.tool_calls[:1] if m.tool_calls else []) | tojson ~ m.content",
            [
                USER,
                calling(call("weather", city="Oslo"), call("clock", zone="CET")),
                said("tool", "x"),
                ANSWER,
            ],
            "tool calls: clock (a:1, message 1)",
        ),
        (
            f"({CALLS}) if m.tool_calls else m.content",
            [USER, calling(call("weather", city="Oslo"), content="I look."), said("tool", "x"), ANSWER],
            "content of the assistant: I look. (a:1, message 1)",
        ),
        (
            f"m.content ~ ({CALLS} | replace('where', '') if m.tool_calls)",
            [USER, calling(call("weather", where={"towns": [{"name": "Oslo"}]})), said("tool", "x"), ANSWER],
            "arguments of tool calls: where (a:1, message 1)",
        ),
        (
            "m.content if not loop.first and m.content != messages[loop.index0 - 1].content else ''",
            [said("user", "Hi"), said("assistant", "Hi"), said("user", "Hi there"), ANSWER],
            "content of the assistant: Hi (a:1, message 1)",
        ),
        (
            "m.content if loop.last else ''",
            [USER, said("assistant", "user"), USER, ANSWER],
            "content of the assistant: user (a:1, message 1)",
        ),
    ],
)
def test_a_part_that_the_template_leaves_out_is_an_error_that_names_it(
    body: str, messages: list[Any], missed: str
) -> None:
    assert refused(CHATML.replace("BODY", body), *messages) == missed


def test_a_tool_result_and_a_system_message_that_are_left_out_are_errors() -> None:
    template = CHATML.replace("BODY", ALL).replace("m.content }}<|im_end|>{% endif", "X }}<|im_end|>{% endif")
    rare = "m.content if 'rain' not in m.content else ''"
    chat = [
        said("system", "Be rainy."),
        USER,
        calling(call("weather", city="Oslo")),
        said("tool", "rain"),
        ANSWER,
    ]
    assert "system messages: Be rainy." in refused(template.replace("X", rare), *chat)
    assert "results of tools: rain" in refused(template.replace("X", rare), *chat[1:])
    assert isinstance(encoded(template.replace("X", "m.content"), *chat), encoding.Encoded)


def test_a_tool_that_is_left_out_is_an_error() -> None:
    template = "{% if tools %}{{ tools[0] | tojson }}{% endif %}" + CHATML.replace("BODY", ALL)
    assert "tools: clock" in refused(template, USER, ANSWER, tools=TOOLS)
    assert isinstance(encoded(template, USER, ANSWER, tools=TOOLS[:1]), encoding.Encoded)


@pytest.mark.parametrize(
    "written", ["tojson", "tojson(ensure_ascii=True)", "tojson(indent=2)", "string", "e"]
)
def test_arguments_are_found_however_the_template_writes_them(written: str) -> None:
    arguments = {
        "code": "if a < \"b\" & c:\n\treturn 'é'\n",
        "deep": {"list": [1, 2.5, 1e-7, True, False, None, -3], "empty": {}, "text": ""},
        "json": '{"a": "b \\"c\\""}',
        "both": 'it\'s "so"',
    }
    body = f"m.content ~ ({CALLS.replace('tojson', 'string')} | {written} if m.tool_calls)"
    if written.startswith("tojson"):
        body = body.replace("map('string') | join | ", "list | ")
    chat = [USER, calling(call("weather", **arguments)), said("tool", "x"), ANSWER]
    assert isinstance(encoded(CHATML.replace("BODY", body), *chat), encoding.Encoded)


def test_spaces_that_the_template_strips_are_no_loss() -> None:
    template = CHATML.replace("BODY", "m.content | trim").replace("{{ m.content }}", "{{ m.content | trim }}")
    found = encoded(template, said("user", "  Who?\n\n"), said("assistant", "\n Maria.  \n"))
    assert isinstance(found, encoding.Encoded)


def test_reasoning_that_the_template_leaves_out_of_earlier_turns_is_counted_and_shown() -> None:
    last = "(m.reasoning_content ~ '</think>' if m.reasoning_content and loop.last) ~ m.content"
    chat = [USER, said("assistant", "A.", reasoning_content="old thought"), USER, ANSWER]
    chat[-1] = {**ANSWER, "reasoning_content": "new thought"}
    found = encoded(CHATML.replace("BODY", last), *chat)
    assert isinstance(found, encoding.Encoded) and found.left_out
    assert found.left_out == ("reasoning", "old thought", 1)


@pytest.mark.parametrize(
    ("body", "left_out"),
    [
        ("m.content", True),
        ("(m.name ~ ': ' if m.name) ~ m.content", False),
    ],
)
def test_name_of_a_speaker_that_the_template_leaves_out_is_counted(body: str, left_out: bool) -> None:
    found = encoded(CHATML.replace("BODY", body), USER, {**ANSWER, "name": "Al"})
    assert isinstance(found, encoding.Encoded)
    assert found.left_out == (content_check.Part("name", "Al", 1) if left_out else None)


def test_short_texts_that_the_template_itself_writes_are_looked_at_once_more() -> None:
    parts = [content_check.Part("user", "user", 0), content_check.Part("assistant", "Maria", 1)]
    text = "<|im_start|>user\nuser<|im_end|>\n<|im_start|>assistant\nMaria<|im_end|>"
    assert content_check.doubtful(parts, text) == parts[:1]
    assert not content_check.find_missing(parts, text)


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen2_5", "llama3", "chatml", "gemma", "phi3", "mistral", "glm4moe"]
)
def test_nothing_is_missed_in_chats_that_bundled_templates_render_whole(name: str) -> None:
    encoder = encoder_of(tokenizer_with(chat_templates.read_template(name), bos=True))
    chats = [
        [said("user", "user"), said("assistant", "a"), said("user", "assistant"), said("assistant", "model")],
        [
            said("user", " Hi\n\nthere "),
            said("assistant", '{"a": "<b>"}\n'),
            said("user", "Hi"),
            said("assistant", "Hi"),
        ],
        [said("user", "é 漢字 \u2028 x"), said("assistant", "1 < 2 & 3 > 2 'so' \"it\" is")],
    ]
    for found in encoder([Example("a:1", chat, None, (True,) * (len(chat) // 2)) for chat in chats]):
        assert isinstance(found, encoding.Encoded), found


def test_search_ends_after_enough_missing_parts_of_a_kind() -> None:
    """The reasoning of 4,000 turns is left out. A search for each takes quadratic time."""
    parts, text = [], ""
    for number in range(4000):
        parts += [
            content_check.Part("reasoning", f"thought {number} of a long chat", number),
            content_check.Part("assistant", f"answer {number} of a long chat", number),
        ]
        text += f"<|im_start|>assistant\nanswer {number} of a long chat<|im_end|>\n"
    missing = content_check.find_missing(parts, text)
    assert len(missing) <= 2 * content_check.ENOUGH
    assert all(part.kind == "reasoning" for part in missing)
    of_user = content_check.Part("user", "What comes after the reasoning?", 4000)
    last = content_check.Part("reasoning", "a thought of the last turn", 4001)
    assert last in content_check.find_missing([*parts, of_user, last], text + of_user.text)


def test_a_text_of_many_spaces_takes_no_place_from_a_longer_one() -> None:
    """The order of the search is that of lengths without whitespace, by which the parts are compared."""
    spaced, answer = f"not{' ' * 40}yet", "It is not yet time."
    parts = [content_check.Part("assistant", answer, 1), content_check.Part("user", spaced, 2)]
    text = "assistant: It is not yet time.\nuser: not yet\n"
    assert content_check.find_missing(parts, text) == []
    assert content_check.find_missing(parts, text.replace("not yet\n", "no\n")) == [parts[1]]
