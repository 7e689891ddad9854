"""Messages of a chat, however they are written: roles, parts, tool calls, reasoning, and their order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune.data.examples import BadRow, Example
from finetune.data.formats import unused
from finetune.recipe.schema import Data
from support.chat_rows import ANSWER, CALL, CHAT, USER, bad, bad_chat, chat, read, row


def test_messages_stay_as_they_are() -> None:
    turns = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert chat(*turns) == Example("rows.jsonl:7", messages=turns, trained=(True,))


def test_a_content_in_parts_is_joined_and_its_reasoning_kept_beside_it() -> None:
    parts = [{"type": "reasoning", "value": "Two names."}, {"type": "text", "text": "Ma"}, "ria"]
    parts.append({"type": "tool_call", "value": '{"name": "look", "arguments": {"at": "door"}}'})
    found = chat(
        {"role": "user", "content": [{"type": "text", "value": "Who?"}]}, {**ANSWER, "content": parts}
    )
    assert found.messages == [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Maria", "reasoning_content": "Two names.", "tool_calls": [CALL]},
    ]


def test_tools_may_be_wrapped_or_not_and_be_json_each() -> None:
    function = {"name": "look"}
    wrapped = [{"type": "function", "function": function}]
    for tools in (wrapped, [function], [json.dumps(function)], json.dumps(wrapped)):
        assert chat(*CHAT, tools=tools).tools == wrapped
    assert all(chat(*CHAT, tools=tools).tools is None for tools in (None, "", "[]", []))


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": {"name": "look", "arguments": '{"at": "door"}'}}],
        [{"name": "look", "arguments": {"at": "door"}}],
        [{"name": "look", "parameters": {"at": "door"}}],
        [{"name": "look", "args": {"at": "door"}, "type": "tool_call"}],  # LangChain
        [{"name": "look", "input": {"at": "door"}, "type": "tool_use"}],
        [{"name": "look", "arguments": None, "parameters": {"at": "door"}}],  # of a table with both columns
        [{"name": "look", "arguments": {}, "args": '{"at": "door"}'}],
        [{"function": {"name": "look"}, "arguments": {"at": "door"}}],
        {"name": "look", "arguments": '{"at": "door"}'},
        json.dumps([CALL]),
        [json.dumps(CALL)],
    ],
)
def test_tool_calls_are_read_however_they_are_written(calls: Any) -> None:
    found = chat(
        USER, {"role": "assistant", "content": None, "tool_calls": calls}, {**USER, "role": "tool"}, ANSWER
    )
    assert found.messages and found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_a_call_keeps_its_id_and_may_have_no_arguments() -> None:
    for none in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": "{}"}):
        found = chat(
            USER, {"role": "assistant", "tool_calls": [{"id": "a1", "function": {"name": "x", **none}}]}
        )
        called = {"type": "function", "function": {"name": "x", "arguments": {}}, "id": "a1"}
        assert found.messages and found.messages[1]["tool_calls"] == [called]
    old_way = {"role": "assistant", "content": "I look.", "function_call": CALL["function"]}
    assert (chat(USER, old_way).messages or [])[1]["tool_calls"] == [CALL]


@pytest.mark.parametrize("arguments", ["0", False, 0, "[1]", "text", [1], True], ids=repr)
def test_arguments_that_are_no_mapping_are_an_error(arguments: Any) -> None:
    with pytest.raises(BadRow, match=r"must be (a mapping|valid JSON)"):
        chat(USER, {"role": "assistant", "tool_calls": [{"name": "x", "arguments": arguments}]})


def test_two_kinds_of_arguments_are_an_error_and_other_keys_of_a_call_are_counted() -> None:
    twice = {"name": "x", "arguments": {"a": 1}, "parameters": {"a": 2}}
    with pytest.raises(BadRow, match="its arguments twice"):
        chat(USER, {"role": "assistant", "tool_calls": [twice]})
    asks: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "x", "kwargs": {"a": 1}, "index": 0}]},
        {"role": "assistant", "content": "", "tool_calls": json.dumps([{"name": "x", "argument": 0}])},
        {"role": "assistant", "function_call": {"name": "x", "argument": 1, "note": None}},
        {"role": "assistant", "content": [{"type": "tool_call", "value": {"name": "x", "argument": 1}}]},
        {"from": "function_call", "value": '{"name": "x", "argument": 1}'},
    ]
    for ask, name in zip(asks, ["kwargs", *["argument"] * 4], strict=True):
        assert unused(row(messages=[USER, ask]), Data(name="-"), "messages") == [f"{name} of a tool call"]
    good = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "1", "index": 0}]}
    assert unused(row(messages=[USER, good]), Data(name="-"), "messages") == []


def test_parts_of_a_message_in_an_order_that_no_template_writes_are_counted() -> None:
    thinks, text = {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I look."}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    for parts, counted in (
        ([thinks, text, call], []),
        ([call, text], ["order"]),
        ([thinks, text, thinks], ["order"]),
    ):
        value = row(messages=[USER, {"role": "assistant", "content": parts}])
        assert [name.split()[1] for name in unused(value, Data(name="-"), "messages")] == counted


def test_roles_have_other_names_by_role_map() -> None:
    turns = [{"role": "sys", "content": "Be brief."}, {**USER, "role": "me"}, {**ANSWER, "role": "bot"}]
    names = {"sys": "system", "me": "user", "bot": "assistant"}
    found = chat(*turns, role_map=names, system="Be brief.")
    assert found.messages == [{"role": "system", "content": "Be brief."}, *CHAT]


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("<think>\nTwo names.\n</think>\n\nMaria.", "Maria."),
        ("Two names.</think>\nMaria.", "Maria."),
        ("<think>a</think>Maria <think>b</think>and Omar.", "Maria and Omar."),
        ("Maria.", "Maria."),
    ],
)
def test_reasoning_is_kept_or_cut_by_choice(said: str, left: str) -> None:
    for beside in ({}, {"reasoning_content": "x"}, {"reasoning": "x"}, {"thinking": "x"}):
        answer = {"role": "assistant", "content": said, **beside}
        assert chat(USER, answer).messages == [USER, answer]
        assert chat(USER, answer, reasoning="cut").messages == [USER, {"role": "assistant", "content": left}]


def test_reasoning_that_never_ends_can_t_be_cut() -> None:
    found = bad_chat(USER, {"role": "assistant", "content": "<think>\nTwo names"}, reasoning="cut")
    assert found.kind == "malformed" and "needs the end of the reasoning" in found.problem.what
    only = bad_chat(USER, {"role": "assistant", "content": "<think>Two names</think>\n"}, reasoning="cut")
    assert only.problem.what == "`content` is empty"


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}, {"loss_weight": 0}])
def test_a_message_may_say_that_it_is_not_trained_on(flag: dict[str, Any]) -> None:
    assert chat(USER, {**ANSWER, **flag}, USER, ANSWER).trained == (False, True)


@pytest.mark.parametrize(
    ("messages", "place", "what"),
    [
        (["Who?"], ", message 0", "a message must be a mapping"),
        ([{"role": "human", "content": "a"}], ", message 0", "unknown role"),
        ([USER, {"content": "a"}], ", message 1", "a message has no role"),
        ([USER, {"role": ["user"], "content": "a"}], ", message 1", "unknown role"),
        ([USER, {"role": "assistant", "content": None}], ", message 1", "`content` must be a string"),
        ([USER, {"role": "assistant", "content": 5}], ", message 1", "`content` must be a string"),
        ([{"role": "user", "content": " \n"}, ANSWER], ", message 0", "`content` is empty"),
        ([USER, {"role": "assistant", "content": []}], ", message 1", "`content` is empty"),
        ([USER, {**ANSWER, "content": [{"type": "image"}]}], ", message 1", "unknown type of a content part"),
        (
            [USER, {**ANSWER, "content": [{"type": ["text"]}]}],
            ", message 1",
            "unknown type of a content part",
        ),
        ([USER, {**ANSWER, "content": [{"type": "text"}]}], ", message 1", "`content` must be a string"),
        ([USER, {**ANSWER, "tool_calls": ["{"]}], ", message 1", "a tool call must be valid JSON"),
        ([USER, {**ANSWER, "tool_calls": 5}], ", message 1", "a tool call has no name"),
        ([USER, {**ANSWER, "tool_calls": [{"name": 5}]}], ", message 1", "a tool call has no name"),
        (
            [USER, {**ANSWER, "tool_calls": [{"name": "x", "arguments": "5"}]}],
            ", message 1",
            "must be a mapping",
        ),
        (
            [USER, {**ANSWER, "tool_calls": [{"name": "x", "arguments": {"a": b"1"}}]}],
            ", message 1",
            "be valid JSON",
        ),
        (
            [USER, {**ANSWER, "reasoning_content": ["a"]}],
            ", message 1",
            "`reasoning_content` must be a string",
        ),
        ("Who?", "", "`messages` must be a list of messages"),
        ([], "", "`messages` must be a list of messages"),
        ('[{"role": ', "", "messages must be valid JSON"),
        ('[{"role": "user", "content": "a", "content": "b"}]', "", "messages must be valid JSON"),
        (r'[{"role": "user", "content": "\ud83d"}]', "", "messages must be valid JSON"),
    ],
)
def test_a_malformed_row_is_named_with_its_message(messages: Any, place: str, what: str) -> None:
    found = bad(row(messages=messages))
    assert found.kind == "malformed" and what in found.problem.what
    assert found.problem.where == f"rows.jsonl:7{place}"


def test_an_unknown_role_comes_with_the_role_map_that_mends_it() -> None:
    for role, meant in (
        ("gpt", "assistant"),
        ("human", "user"),
        ("developer", "system"),
    ):
        assert bad_chat({"role": role, "content": "a"}).problem.fix == f"role_map: {{{role}: {meant}}}"


@pytest.mark.parametrize(
    ("roles", "kind", "what"),
    [
        (["assistant"], "role_order", "the role assistant is not allowed in the first message"),
        (["tool"], "role_order", "the role tool is not allowed in the first message"),
        (["user", "user", "assistant"], "role_order", "the role user is not allowed after user"),
        (
            ["user", "assistant", "assistant"],
            "role_order",
            "the role assistant is not allowed after assistant",
        ),
        (["user", "tool", "assistant"], "role_order", "the role tool is not allowed after user"),
        (["user", "system", "assistant"], "role_order", "the role system is not allowed after user"),
        (["system", "system", "user"], "role_order", "the role system is not allowed after system"),
        (["system", "assistant"], "role_order", "the role assistant is not allowed after system"),
        (["user", "assistant", "user"], "unanswered", "the last message is not from the assistant"),
        (["user"], "unanswered", "the last message is not from the assistant"),
        (["system"], "unanswered", "the last message is not from the assistant"),
    ],
)
def test_roles_stand_in_order(roles: list[str], kind: str, what: str) -> None:
    found = bad_chat(*({"role": role, "content": "a"} for role in roles))
    assert found.kind == kind and what in found.problem.what and found.problem.found == ", ".join(roles)


def test_two_results_of_two_calls_and_an_empty_system_message_are_in_order() -> None:
    called, result = {"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "tool", "content": ""}
    found = chat({"role": "system", "content": " "}, USER, called, result, result, ANSWER)
    assert found.messages == [USER, {**called, "content": ""}, result, result, ANSWER]
    assert found.trained == (True, True)


def test_openais_tool_calls_become_what_templates_expect() -> None:
    """Arguments as JSON text, a null content, calls in parallel, and results by `tool_call_id`."""
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": {n}}}'}}
        for n in (1, 2)
    ]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"seen {n}"} for n in (1, 2)]
    asks = {"role": "assistant", "content": None, "tool_calls": calls}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    value = row(messages=[USER, asks, *results, ANSWER], tools=tools, parallel_tool_calls=True)
    found = read(value)
    turns = found.messages or []
    assert [call["function"]["arguments"] for call in turns[1]["tool_calls"]] == [{"at": 1}, {"at": 2}]
    assert [call["id"] for call in turns[1]["tool_calls"]] == ["call_1", "call_2"]
    assert turns[1]["content"] == "" and turns[2:4] == results and found.tools == tools
    assert unused(value, Data(name="-"), "messages") == ["parallel_tool_calls"]
    assert chat(USER, {**asks, "weight": 0}, *results, ANSWER).trained == (False, True)


def test_anthropics_messages_become_what_templates_expect() -> None:
    """Thinking, tool uses and tool results are parts; a system prompt can be a list of blocks."""
    asks = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "At the door?", "signature": "x"},
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "door"}},
        ],
    }
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Maria"}]}
    tools = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    messages = [USER, asks, {"role": "user", "content": [result]}, ANSWER]
    value = row(system=system, messages=messages, tools=tools)
    found = read(value)
    turns = found.messages or []
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert turns[0]["content"] == "Be brief." and turns[2]["content"] == "Let me look."
    assert turns[2]["reasoning_content"] == "At the door?"
    call = {"name": "look", "arguments": {"at": "door"}}
    assert turns[2]["tool_calls"] == [{"type": "function", "function": call, "id": "toolu_1"}]
    assert turns[3] == {"role": "tool", "tool_call_id": "toolu_1", "content": "Maria"}
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
    assert found.tools == [{"type": "function", "function": function}] and found.trained == (True, True)
    named = ["cache_control of a content part", "signature of a content part"]
    assert unused(value, Data(name="-"), "messages") == named


LOOK = {"name": "look", "arguments": {"at": "door"}}
USE = {"type": "tool_use", "name": "look", "input": {}}


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "text", "text": "", "content": "lost"}, "content"),
        ({"type": "text", "text": "Hi", "input": {"a": 1}}, "input"),
        ({**USE, "text": "lost"}, "text"),
        ({**USE, "content": "lost"}, "content"),
        ({"type": "thinking", "thinking": "Hm", "text": "lost"}, "text"),
        ({"type": "tool_result", "content": "", "text": "lost"}, "text"),
        ({"type": "tool_result", "content": [{"type": "text", "text": "", "content": "lost"}]}, "content"),
    ],
)
def test_value_that_a_part_of_its_type_does_not_have_is_named(part: dict[str, Any], named: str) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    holder = {"role": "user", "content": [part]} if part["type"] == "tool_result" else answer
    answer["content"] += [part] if holder is answer else []
    assert f"{named} of a content part" in unused(
        row(messages=[USER, holder, ANSWER]), Data(name="-"), "messages"
    )


def test_two_values_for_one_thing_are_an_error() -> None:
    call = {"from": "function_call", "value": json.dumps(LOOK), "tool_calls": [{**LOOK, "name": "other"}]}
    found = bad(row(conversations=[{"from": "human", "value": "Who?"}, call]))
    assert "tool calls in two places" in found.problem.what
    tool = {"name": "look", "parameters": {"a": 1}, "input_schema": {"type": "object"}}
    assert "another `input_schema`" in bad(row(messages=[USER, ANSWER], tools=[tool])).problem.what
    for empty in ({}, None):
        tools = read(row(messages=[USER, ANSWER], tools=[{**tool, "parameters": empty}])).tools or []
        assert tools[0]["function"] == {"name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("number", ["1e400", "-1E999", "NaN", "Infinity"])
def test_number_that_json_does_not_have_is_an_error_in_text_too(number: str) -> None:
    call = {"name": "look", "arguments": f'{{"a": {number}}}'}
    assert "valid JSON" in bad_chat(USER, {**ANSWER, "tool_calls": [call]}).problem.what
    fine = {"name": "look", "arguments": '{"a": 1e40, "b": "1e400"}'}
    assert chat(USER, {**ANSWER, "tool_calls": [fine]}).messages


def test_what_anthropics_parts_hold_and_no_text_can_is_an_error() -> None:
    for part in ({"type": "image", "source": {}}, {"type": "redacted_thinking", "data": "x"}):
        assert bad_chat(USER, {"role": "assistant", "content": [part]}).problem.what.startswith(
            "unknown type"
        )
    late = {
        "role": "user",
        "content": [{"type": "tool_result", "content": "Maria"}, {"type": "text", "text": "?"}],
    }
    asks = {"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {}}]}
    assert bad_chat(USER, asks, late, ANSWER).kind == "role_order"


@pytest.mark.parametrize(
    ("turn", "content"),
    [
        ({"role": "system", "content": "", "value": "You are a pirate."}, "You are a pirate."),
        ({"role": "system", "content": None, "from": "system", "value": "Arr."}, "Arr."),
        ({"role": "system", "from": "", "content": "Arr.", "value": ""}, "Arr."),
        ({"role": "system", "content": "Arr.", "value": "Arr."}, "Arr."),
        ({"role": "system", "content": [{"type": "text", "text": "", "value": "Arr."}]}, "Arr."),
    ],
)
def test_value_under_one_of_two_names_is_read(turn: dict[str, Any], content: str) -> None:
    assert chat(turn, *CHAT).messages[0]["content"] == content


@pytest.mark.parametrize(
    "turn",
    [
        {**ANSWER, "value": "another answer"},
        {**ANSWER, "from": "user"},
        {**ANSWER, "tool_calls": [CALL], "function_call": {"name": "look", "arguments": "{}"}},
        {**ANSWER, "content": [{"type": "text", "text": "a", "value": "b"}]},
    ],
)
def test_message_with_two_values_of_one_part_is_refused(turn: dict[str, Any]) -> None:
    assert any(word in bad_chat(USER, turn).problem.what for word in ("and another", "two roles"))
