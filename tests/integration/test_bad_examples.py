"""Every kind of bad example: `check` and `data` give one verdict, and none ends in a traceback."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.cli import main
from support.paths import QUICKSTART

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


@pytest.mark.parametrize(("kind", "content"), [*REFUSED.items(), *ACCEPTED.items()])
def test_check_and_data_agree_on_a_kind_of_example(kind: str, content: bytes, tmp_path, capsys) -> None:
    (rows := tmp_path / "rows.jsonl").write_bytes(content)
    options = [f"data.name={rows}", "data.validation=null", "train.effective_batch_size=1"]
    codes = [main.main([command, str(QUICKSTART), *options, "--quiet"]) for command in ("check", "data")]
    said = capsys.readouterr().err
    expected = 2 if kind in REFUSED else 0
    assert codes == [expected, expected], said
    assert str(rows) in said if expected else not said
