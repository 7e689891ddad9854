"""Rows of every format as one thing; what is wrong with a row, and where."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from finetune.core.errors import UserError
from finetune.data import source_loading
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert, detect, unused
from finetune.recipe.schema import Data, Source
from support.chat_rows import ANSWER, CALL, CHAT, USER, bad, chat, read, row
from support.paths import ASSETS


@pytest.mark.parametrize(
    ("value", "format"),
    [
        ({"messages": CHAT}, "messages"),
        ({"conversations": CHAT}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"text": "a"}, "text"),
        ({"text": "a", "messages": CHAT}, "messages"),
    ],
)
def test_the_format_is_seen_from_the_columns(value: dict[str, Any], format: str) -> None:
    assert detect(Row(value, "-"), Data(name="-")) == format


@pytest.mark.parametrize(
    ("value", "columns", "left"),
    [
        (
            {"q": "a", "a": "b", "system": "c", "tools": []},
            {"prompt": "q", "completion": "a"},
            "system tools",
        ),
        ({"q": [USER], "a": [ANSWER], "system": "c"}, {"prompt": "q", "completion": "a"}, ""),
        ({"prompt": "a", "messages": CHAT, "system": "c"}, {}, "prompt"),
        ({"messages": CHAT, "conversations": CHAT}, {}, "conversations"),
        ({"messages": CHAT, "history": [["a", "b"]], "input": ""}, {}, "history"),
        ({"instruction": "a", "output": "b", "history": [["a", "b"]]}, {}, ""),
    ],
)
def test_a_column_is_said_to_be_unused_where_it_is(value: dict[str, Any], columns: Any, left: str) -> None:
    data = Data(name="-", columns=columns)
    found = Row(value, "-")
    assert unused(found, data, detect(found, data)) == left.split()


def test_the_recipe_may_name_the_format() -> None:
    value = row(text="a", prompt="b", completion="c")
    assert read(value).prompt == "b"
    assert read(value, format="text") == Example("rows.jsonl:7", completion="a")


def test_columns_that_are_none_of_these_are_an_error_that_shows_them() -> None:
    with pytest.raises(UserError) as raised:
        detect(row(question="a", answer="b"), Data(name="-"))
    text = str(raised.value)
    assert "question, answer" in text and "columns: {instruction: question" in text and "rows.jsonl:7" in text


def test_a_prompt_and_a_completion_may_be_texts_or_lists_of_messages() -> None:
    assert read(row(prompt="a", completion="b")) == Example("rows.jsonl:7", prompt="a", completion="b")
    assert read(row(prompt="", completion="b")).prompt == ""
    value = row(prompt=[*CHAT, USER], completion=[{**ANSWER, "content": "Omar."}])
    found = read(value)
    assert found.messages == [*CHAT, USER, {**ANSWER, "content": "Omar."}]
    assert found.trained == (False, True), "what stands in the prompt is not trained on"
    assert read(value, train_on="all").trained == (True, True)


def test_alpaca_puts_input_under_the_instruction() -> None:
    value = {"instruction": "Sort:", "input": "b a", "output": "a b", "system": "Be brief."}
    assert read(row(**value)).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sort:\n\nb a"},
        {"role": "assistant", "content": "a b"},
    ]
    for nothing in ("", " ", None):
        found = read(row(**{**value, "input": nothing, "system": nothing}))
        assert found.messages and [m["content"] for m in found.messages] == ["Sort:", "a b"]
    assert bad(row(**{**value, "input": 5})).problem.what == "`input` must be a string"


def test_sharegpt_with_calls_observations_and_tools() -> None:
    tool = {"name": "look", "description": "", "parameters": {}}
    turns = [
        {"from": "human", "value": "Who came?"},
        {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "door"}}'},
        {"from": "observation", "value": "Maria"},
        {"from": "gpt", "value": "Maria did."},
    ]
    found = read(row(conversations=turns, tools=json.dumps([tool]), system="Be brief."))
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "Maria"},
        ANSWER,
    ]
    assert found.tools == [{"type": "function", "function": tool}]
    assert found.trained == (True, True)
    turns[1]["value"] = json.dumps([CALL["function"], CALL["function"]])
    messages = read(row(conversations=turns)).messages
    assert messages and messages[1]["tool_calls"] == [CALL, CALL]


def test_columns_have_other_names_by_columns() -> None:
    columns = {"instruction": "question", "output": "answer"}
    found = read(row(question="Who?", answer="Maria.", output="unused"), columns=columns)
    assert found.messages == [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Maria."}]
    value = row(messages=CHAT, tools="not read")
    assert read(value, columns={"tools": "nothing"}).tools is None, "a column is left out by another's name"


def test_an_unknown_column_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError) as raised:
        read(row(question="a", anser="b"), columns={"instruction": "question", "output": "answer"})
    text = str(raised.value)
    assert 'data.columns.output: the example has no column "answer" (rows.jsonl:7)' in text
    assert "found:     question, anser" in text and "help:      output: anser" in text
    with pytest.raises(UserError) as raised:
        read(row(question="a"), columns={"instrction": "question"})
    assert "data.columns.instrction: finetune has no column of this name" in str(raised.value)
    assert "help:      rename it to `instruction`" in str(raised.value)


def test_a_later_row_without_a_column_is_that_row_s_fault_alone() -> None:
    recipe = Data(name="-", columns={"instruction": "question", "output": "answer"})
    assert detect(row(question="a", answer="b"), recipe) == "alpaca"
    with pytest.raises(BadRow, match="`output` must be a string"):
        convert(row(question="a"), recipe, "alpaca")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ({"prompt": "a", "completion": ""}, "`completion` is empty"),
        ({"prompt": "a", "completion": CHAT}, "`completion` must be a string"),
        ({"prompt": [USER], "completion": "a"}, "`completion` must be a list of messages"),
        ({"prompt": b"a", "completion": "a"}, "`prompt` must be a string or a list of messages"),
        ({"instruction": None, "output": "b"}, "`instruction` must be a string"),
        ({"instruction": "a", "output": 5}, "`output` must be a string"),
        ({"text": "  "}, "`text` is empty"),
        ({"conversations": None}, "`conversations` must be a list of messages"),
        ({"messages": CHAT, "tools": "look"}, "tools must be valid JSON"),
        ({"messages": CHAT, "tools": '{"name": "look"}'}, "`tools` must be a list of mappings"),
        ({"messages": CHAT, "tools": [5]}, "`tools` must be a list of mappings"),
        ({"messages": CHAT, "tools": [{"function": 5}]}, "`tools` must be a list of mappings"),
        ({"messages": CHAT, "system": 5}, "`system` must be a string"),
    ],
)
def test_a_malformed_row_of_each_other_format(value: dict[str, Any], what: str) -> None:
    found = bad(Row(value, "rows.jsonl:7"))
    assert found.kind == "malformed" and found.problem.what == what


def test_digests_tell_examples_apart_by_content() -> None:
    tools = [{"name": "look"}]
    called = {"role": "assistant", "content": "Maria did.", "tool_calls": [CALL]}
    rows = [chat(*CHAT), chat(*CHAT, tools=tools), chat(USER, called), read(row(prompt="a", completion="b"))]
    rows += [read(row(text="ab")), chat(*CHAT, *CHAT), chat({**USER, "content": "Who?"}, ANSWER)]
    assert len({example.digest() for example in rows}) == len(rows)
    assert (
        chat(*CHAT).digest() == convert(Row({"messages": CHAT}, "b:1"), Data(name="-"), "messages").digest()
    )


# ---- real files


def asset(name: str, bad_rows: int = 0, **data: Any) -> list[Example]:
    path = ASSETS / name
    if not path.exists():
        pytest.skip(f"no {name} in {ASSETS} (FINETUNE_TEST_ASSETS)")
    recipe = Data(name=str(path), **data)
    read = source_loading.training(recipe, Source(name=str(path)), set(), 0)
    rows = [row for row in read if isinstance(row, Row)]
    found: list[Example] = []
    for one in rows:
        with contextlib.suppress(BadRow):
            found.append(convert(one, recipe, detect(rows[0], recipe)))
    assert len(found) == len(rows) - bad_rows > 0
    return found


def test_real_sharegpt_with_tools() -> None:
    found = asset("instruct-formats/glaive_toolcall_en_demo.json")
    assert len(found) == 300
    calls = [m for example in found for m in example.messages or () if "tool_calls" in m]
    assert len(calls) > 100 and all(
        example.tools for example in found if "tool_calls" in str(example.messages)
    )
    assert all(isinstance(c["function"]["arguments"], dict) for m in calls for c in m["tool_calls"])


def test_real_messages_in_parts_with_reasoning_and_tools() -> None:
    found = asset("instruct-formats/reason_tool_use_demo_50.jsonl")
    messages = [message for example in found for message in example.messages or ()]
    assert len(found) == 50 and all(isinstance(message["content"], str) for message in messages)
    assert any("reasoning_content" in m for m in messages) and any("tool_calls" in m for m in messages)
    # in row 7 all of an answer stands before </think>
    cut = asset("instruct-formats/reason_tool_use_demo_50.jsonl", bad_rows=1, reasoning="cut")
    assert not any("reasoning_content" in message for example in cut for message in example.messages or ())


def test_real_messages_with_loss_weights() -> None:
    assert all(any(example.trained) for example in asset("instruct-formats/v1_sft_demo.jsonl"))


def test_real_alpaca_and_other_columns() -> None:
    assert [m["role"] for m in asset("instruct-formats/identity.json")[0].messages or ()] == [
        "user",
        "assistant",
    ]
    columns = {"instruction": "question", "output": "answer"}
    assert "#### " in asset("gsm8k/train.jsonl", columns=columns)[0].answer
    for name in ("ARC-Challenge_train", "ARC-Easy_train", "openbookqa_train"):
        assert all(e.answer.startswith("the correct answer is") for e in asset(f"commonsense/{name}.json"))


def test_keys_of_messages_that_are_not_used_are_named() -> None:
    turns = [{**USER, "refusal": None, "annotations": ["a"]}, {**ANSWER, "weight": 1}]
    assert unused(row(messages=turns), Data(name="-"), "messages") == ["annotations of a message"]


def test_the_history_of_alpaca_rows_is_read() -> None:
    value = {"instruction": "And 4?", "input": "", "output": "7", "history": [["Add 1 and 2", "3"]]}
    expected = [("user", "Add 1 and 2"), ("assistant", "3"), ("user", "And 4?"), ("assistant", "7")]
    for history in (value["history"], '[["Add 1 and 2", "3"]]'):  # as a column of a csv file has it
        found = read(row(**{**value, "history": history}))
        assert [(turn["role"], turn["content"]) for turn in found.messages or ()] == expected
    assert len(read(row(**{**value, "history": []})).messages or ()) == 2
    assert (
        bad(row(**{**value, "history": ["Add 1 and 2", "3"]})).problem.what
        == "`history` must be a list of pairs"
    )


SYSTEM = {"role": "system", "content": "Answer in one word."}


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [SYSTEM, *CHAT]},
        {"conversations": [SYSTEM, *CHAT]},
        {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in (SYSTEM, *CHAT)]},
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        {"messages": [{**SYSTEM, "content": [{"type": "text", "text": SYSTEM["content"]}]}, *CHAT]},
    ],
)
def test_a_system_column_and_a_system_turn_become_one_message(value: dict[str, Any]) -> None:
    roles = {"user": "user", "assistant": "assistant", "system": "system"}
    asked = {"role_map": roles} if "from" in str(value) else {}
    both = read(row(**value, system="You keep a shop."), **asked)
    assert (both.messages or [])[0] == {
        "role": "system",
        "content": "You keep a shop.\n\nAnswer in one word.",
    }
    for equal in (SYSTEM["content"], f" {SYSTEM['content']}\n", "", None):
        once = read(row(**value, system=equal), **asked)
        assert once.messages == [SYSTEM, *CHAT]


def test_a_system_column_stands_in_for_a_blank_system_turn() -> None:
    found = read(row(messages=[{"role": "system", "content": " "}, *CHAT], system="Be brief."))
    assert found.messages == [{"role": "system", "content": "Be brief."}, *CHAT]


def test_a_system_column_in_parts_is_text_as_the_content_of_a_message() -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    for column in ("Be brief.", parts, ["Be ", "brief."]):
        found = read(row(messages=CHAT, system=column))
        assert found.messages == [{"role": "system", "content": "Be brief."}, *CHAT]
    for column in (5, [5], [{"type": "image_url"}], [{"type": "reasoning", "text": "hm"}]):
        wrong = bad(row(messages=CHAT, system=column))
        assert wrong.kind == "malformed" and wrong.problem.what in (
            "`system` must be a string",
            "`content` must be a string",
            "unknown type of a content part",
        )
