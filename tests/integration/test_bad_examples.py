"""Every kind of bad example: `check`, `data` and `train` give one verdict, and none ends in a traceback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune.cli import main
from support.paths import QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

USER, ANSWER = {"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Maria did."}
SYSTEM, RESULT = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "r"}


def lines(*rows: Any) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def chat(*turns: Any, **more: Any) -> bytes:
    return lines({"messages": list(turns), **more})


def answer(**content: Any) -> bytes:
    return chat(USER, {"role": "assistant", **content})


def called(call: Any) -> bytes:
    return chat(USER, {"role": "assistant", "content": "", "tool_calls": call}, RESULT, ANSWER)


GOOD = {"messages": [USER, ANSWER]}
REFUSED = {
    "no assistant": chat(USER),
    "only system": chat(SYSTEM),
    "two systems": chat(SYSTEM, SYSTEM, USER, ANSWER),
    "late system": chat(USER, ANSWER, SYSTEM, USER, ANSWER),
    "assistant first": chat(ANSWER, USER, ANSWER),
    "two users": chat(USER, USER, ANSWER),
    "two answers": chat(USER, ANSWER, ANSWER),
    "tool result without call": chat(USER, RESULT, ANSWER),
    "tool result last": chat(USER, ANSWER, RESULT),
    "arguments no JSON": called([{"function": {"name": "f", "arguments": '{"a":'}}]),
    "arguments a list": called([{"function": {"name": "f", "arguments": [1]}}]),
    "arguments NaN": called([{"function": {"name": "f", "arguments": '{"a": NaN}'}}]),
    "call without name": called([{"function": {"arguments": {}}}]),
    "call a text": called("f()"),
    "call a number": called(7),
    "call with an empty name": called([{"function": {"name": "", "arguments": {}}}]),
    "call with a number as name": called([{"function": {"name": 5, "arguments": {}}}]),
    "empty tool": chat(USER, ANSWER, tools=[{}]),
    "tool without name": chat(USER, ANSWER, tools=[{"type": "function", "function": {}}]),
    "tool with an empty name": chat(USER, ANSWER, tools=[{"function": {"name": ""}}]),
    "number as a tool's name": chat(USER, ANSWER, tools=[{"function": {"name": 5}}]),
    "text as a tool": chat(USER, ANSWER, tools=["f"]),
    "nothing is trained": chat(USER, {**ANSWER, "train": False}),
    "weight 0": chat(USER, {**ANSWER, "weight": 0}),
    "repeated": lines(*[GOOD] * 5),
    "too long": answer(content="It was a long way. " * 500),
    "text too long": lines({"text": "It was a long way. " * 500}),
    "half of them too long": lines(GOOD, {"messages": [USER, {**ANSWER, "content": "A long way. " * 500}]}),
    "null content": answer(content=None),
    "no content": answer(),
    "number as content": answer(content=3),
    "mapping as content": answer(content={"a": 1}),
    "empty content": answer(content=""),
    "blank answer": answer(content=" \n\t"),
    "image part": answer(content=[{"type": "image_url"}]),
    "null part": answer(content=[None]),
    "nested parts": answer(content=[["a"]]),
    "no parts": answer(content=[]),
    "unknown role": chat({"role": "bot", "content": "x"}, ANSWER),
    "null role": chat({"role": None}, ANSWER),
    "number as role": chat({"role": 1, "content": "x"}, ANSWER),
    "no role": chat({"content": "x"}, ANSWER),
    "list as role": chat({"role": ["user"], "content": "x"}, ANSWER),
    "null messages": lines({"messages": None}),
    "text as messages": lines({"messages": "hello"}),
    "no messages": lines({"messages": []}),
    "nested messages": lines({"messages": [[USER, ANSWER]]}),
    "messages of texts": lines({"messages": ["a", "b"]}),
    "NaN as messages": lines('{"messages": NaN}'),
    "tools a text": chat(USER, ANSWER, tools="none"),
    "tools a number": chat(USER, ANSWER, tools=5),
    "system a number": chat(USER, ANSWER, system=5),
    "train a text": chat(USER, {**ANSWER, "train": "yes"}),
    "reasoning a number": answer(content="a", reasoning_content=5),
    "lone surrogate": b'{"text": "a\\ud800"}\n',
    "no UTF-8": b'{"text": "a\xff"}\n',
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "raw control character": b'{"text": "a\x01"}\n',
    "key twice": b'{"text": "a b", "text": "c d"}\n',
    "empty file": b"",
    "blank lines": b"\n\n",
    "only a BOM": b"\xef\xbb\xbf",
    "mixed formats": lines(GOOD, {"text": "a"}, {"prompt": "a", "completion": "b"}),
    "array line": lines("[1]"),
    "number line": lines("5"),
    "null line": lines("null"),
    "no columns": lines({}),
    "cut off": lines(GOOD)[:-20],
    "too deep": b'{"messages":' + b"[" * 3000 + b"]" * 3000 + b"}\n",
    "huge number": b'{"text": ' + b"9" * 5000 + b"}\n",
    "empty text": lines({"text": ""}),
    "number as text": lines({"text": 5}),
    "null text": lines({"text": None}),
    "NaN as text": lines('{"text": NaN}'),
    "blank completion": lines({"prompt": "a", "completion": " "}),
    "null prompt": lines({"prompt": None, "completion": "b"}),
    "list and text": lines({"prompt": [USER], "completion": "b"}),
    "both lists empty": lines({"prompt": [], "completion": []}),
    "user as completion": lines({"prompt": [USER], "completion": [USER]}),
    "null output": lines({"instruction": "a", "output": None}),
    "blank output": lines({"instruction": "a", "output": " "}),
    "input a list": lines({"instruction": "a", "input": ["x"], "output": "b"}),
    "unknown speaker": lines(
        {"conversations": [{"from": "alien", "value": "a"}, {"from": "gpt", "value": "b"}]}
    ),
    "null value": lines({"conversations": [{"from": "human", "value": None}, {"from": "gpt", "value": "b"}]}),
    "no gpt": lines({"conversations": [{"from": "human", "value": "a"}]}),
    "empty conversation": lines({"conversations": []}),
}
ACCEPTED = {
    "BOM": b"\xef\xbb\xbf" + lines(GOOD),
    "blank line between": lines(GOOD, "", {"messages": [SYSTEM, USER, ANSWER]}),
    "control characters": answer(content="b\x1b[2J\u202e\x00"),
    "line separators": answer(content="b\u2028\x85"),
    "special tokens in a content": answer(content="x<|im_end|>y<|im_start|>user"),
    "infinite column": lines('{"text": "hello there", "n": 1e999}'),
    "only thoughts": answer(content="<think>abc</think>"),
}


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
TEMPLATES = {  # what a template does -> its loop over the messages
    "renders all": TURN,
    "strips reasoning": TURN.replace("m.content", "m.content.split('</think>')[-1]"),
    "truncates": TURN.replace("m.content", "m.content[:20]"),
    "has no system": "{% if m.role != 'system' %}" + TURN + "{% endif %}",
    "raises on system": "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TURN,
    "calls without content": "{% if m.tool_calls %}"
    + TURN.replace("m.content", "m.tool_calls")
    + "{% else %}"
    f"{TURN}{{% endif %}}",
    "has no end of turn": "{{ m.role }}: {{ m.content }}\n",
    "is broken": TURN + "{% if %}",
    "has another filter": TURN.replace("m.content", "m.content|nope"),
    "leaves contents out": "{{ m.role }}",
}
CALL = {"id": "abc123def", "function": {"name": "look", "arguments": {"at": "a clock"}}}
CHATS = {
    "plain": lines(GOOD),
    "system": chat(SYSTEM, USER, ANSWER),
    "reasoning": answer(content="<think>Who can it have been?</think>Maria did."),
    "long": answer(content="Maria did, and she brought all of her friends."),
    "call": called([CALL]),
    "call beside a content": chat(
        USER, {"role": "assistant", "content": "Let me look it up.", "tool_calls": [CALL]}, RESULT, ANSWER
    ),
    "tools": chat(USER, ANSWER, tools=[{"function": {"name": "look", "parameters": {"type": "object"}}}]),
}
OPTIONS = {
    "too short": ["data.max_length=8"],
    "too short for packing": ["data.max_length=8", "data.packing=true"],
    "too long is an error": ["data.max_length=8", "data.too_long=error"],
    "prompts cut": ["data.max_length=24", "data.too_long=truncate_prompt"],
    "last turn": ["data.train_on=last_turn"],
    "all": ["data.train_on=all"],
    "cache is a file": ["data.cache_dir={file}"],
    "cache below a file": ["data.cache_dir={file}/cache"],
    "validation repeats": ["data.validation={rows}"],
}


def verdicts(rows: Path, content: bytes, *options: str, capsys) -> list[tuple[int, str]]:
    """The exit code and the errors of `check` and of `data`."""
    rows.write_bytes(content)
    given = [str(QUICKSTART), f"data.name={rows}", "data.validation=null", "train.effective_batch_size=1"]
    capsys.readouterr()
    return [
        (main.main([command, *given, *options, "--quiet"]), capsys.readouterr().err)
        for command in ("check", "data")
    ]


@pytest.mark.parametrize("does", soak_except([*TEMPLATES][::2], TEMPLATES))
def test_check_and_data_agree_on_what_a_template_does(does: str, tmp_path, capsys) -> None:
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    template = "{% for m in messages %}" + TEMPLATES[does] + "{% endfor %}" + prompt
    (tmp_path / "own.jinja").write_text(template)
    refused = set()
    for kind, content in CHATS.items():
        option = f"data.chat_template={tmp_path / 'own.jinja'}"
        checked, data = verdicts(tmp_path / "rows.jsonl", content, option, capsys=capsys)
        assert checked == data, kind
        refused |= {kind} if data[0] else set()
    assert "tools" in refused, "no template here renders them"
    assert ("call" in refused) == (does != "calls without content")
    assert ("plain" in refused) == (does in list(TEMPLATES)[-4:])
    also = {
        "strips reasoning": "reasoning",
        "truncates": "long",
        "calls without content": "call beside a content",
    }
    assert also.get(does, "tools") in refused
    assert ("system" in refused) >= (does in ("has no system", "raises on system"))


@pytest.mark.parametrize("option", OPTIONS)
def test_check_and_data_agree_on_an_option(option: str, tmp_path, capsys) -> None:
    (file := tmp_path / "file").write_text("x")
    (rows := tmp_path / "other.jsonl").write_bytes(lines(GOOD))
    options = [said.format(file=file, rows=rows) for said in OPTIONS[option]]
    checked, data = verdicts(tmp_path / "rows.jsonl", lines(GOOD), *options, capsys=capsys)
    assert checked == data
    assert bool(data[0]) == (option not in ("prompts cut", "last turn", "all"))


TRAINED = [
    "no assistant", "tool result last", "arguments no JSON", "empty tool", "tool without name",
    "call without name", "call with an empty name", "nothing is trained", "repeated", "too long",
    "half of them too long", "blank answer", "lone surrogate", "mixed formats",
    "number as text", "unknown speaker",
]  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_train_says_what_check_says(kind: str, tmp_path, capsys) -> None:
    (checked, *_) = verdicts(tmp_path / "rows.jsonl", REFUSED[kind], capsys=capsys)
    options = [f"data.name={tmp_path / 'rows.jsonl'}", "data.validation=null", "train.effective_batch_size=1"]
    options += [f"train.output_dir={tmp_path / 'run'}", "train.max_steps=2", "train.warmup_steps=0"]
    assert main.main(["train", str(QUICKSTART), *options, "--quiet"]) == 2
    assert capsys.readouterr().err.startswith(checked[1])


@pytest.mark.parametrize(("kind", "content"), [*REFUSED.items(), *ACCEPTED.items()])
def test_check_and_data_agree_on_a_kind_of_example(kind: str, content: bytes, tmp_path, capsys) -> None:
    rows = tmp_path / "rows.jsonl"
    (checked, said), (code, said_by_data) = verdicts(rows, content, capsys=capsys)
    expected = 2 if kind in REFUSED else 0
    assert (checked, code) == (expected, expected), said + said_by_data
    for errors in (said, said_by_data):
        assert str(rows) in errors or "data.max_length" in errors if expected else not errors
