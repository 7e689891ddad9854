"""Rows that can't be used: everything that is wrong is said at once, with what most likely helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.core.errors import Problem, UserError
from finetune.data import example_errors
from finetune.data.examples import file_of
from finetune.data.preparation import Prepared, prepare
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Model
from support.paths import MODEL, QUICKSTART

USER, ANSWER = {"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Maria did."}


@pytest.fixture(autouse=True)
def few_first_examples() -> None:
    """Here `check` reads as many as for a user."""


def chat(number: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{**USER, "content": f"Who came {number}?"}, {**ANSWER, **more}]}


def text(number: int) -> dict[str, Any]:
    return {"prompt": f"Who came {number}?", "completion": " Maria did."}


def write(path: Path, content: Any) -> None:
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    path.write_text(content, newline="")


def prepared_of(folder: Path, source: str, **data: Any) -> Prepared:
    given = Data.model_validate({"name": source, "cache_dir": str(folder / "cache"), **data})
    return prepare(given, load_tokenizer(Model(name=str(MODEL))), 0, None)


def read(folder: Path, content: Any, name: str = "rows.jsonl", **data: Any) -> Prepared:
    """What is prepared of rows, or of a file's content."""
    write(folder / name, content)
    return prepared_of(folder, str(folder / name), **data)


def problems(folder: Path, content: Any, name: str = "rows.jsonl", **data: Any) -> tuple[Problem, ...]:
    with pytest.raises(UserError) as raised:
        read(folder, content, name, **data)
    assert raised.value.code == 2
    return raised.value.problems


# ---- tables that are not what they seem


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("prompt;completion", ('";"', "semicolons", 'sep=";"')),
        ('"prompt";"completion"', ('";"', "semicolons", "commas")),
        ("prompt\tcompletion", ("a tab", "tabs", r'sep="\t"')),
    ],
)
def test_a_table_separated_by_something_else_is_told_so(header: str, says: tuple[str, ...], tmp_path) -> None:
    mark = header.strip('"').replace("prompt", "")[0 if '"' not in header else 1]
    (found,) = problems(tmp_path, f"{header}\n" + f"Who, really?{mark}Maria, did.\n" * 9, "a.csv")
    assert found.where.endswith("a.csv:1") and found.found == header
    assert all(word in str(found) for word in says), found


def test_a_header_that_is_a_row_is_told_so(tmp_path) -> None:
    (found,) = problems(tmp_path, "Who came to town?,Maria did.\nWho left?,Omar.\n", "a.csv")
    assert "the first line looks like data" in found.why and "prompt,completion" in found.fix
    (found,) = problems(tmp_path, ",question,answer\n0,a,b\n", "b.csv")
    assert "looks like data" not in found.why, "pandas leaves the name of its index empty"
    (found,) = problems(tmp_path, "prompt,completion\n", "c.csv")
    assert "no example" in found.what and "the first line of a csv file names the columns" in found.why


# ---- columns


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"Prompt": "a", "Completion ": "b"}, {"prompt": "Prompt", "completion": '"Completion "'}),
        ({"id": "1", "answer": "b", "question": "a"}, {"instruction": "question", "output": "answer"}),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, {"completion": "chosen"}),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, {"messages": "chosen"}),
        ({"prompt": "a"}, {"text": "prompt"}),
    ],
)
def test_columns_of_other_names_come_with_the_line_that_reads_them(row: Any, columns: Any, tmp_path) -> None:
    (found,) = problems(tmp_path, [row])
    said = ", ".join(f"{ours}: {theirs}" for ours, theirs in columns.items())
    assert f"columns: {{{said}}}" in found.fix
    named = {ours: theirs.strip('"') for ours, theirs in columns.items()}
    assert read(tmp_path, [row], columns=named).report["train"].kept == 1


def test_rows_inside_of_something_else_are_found(tmp_path) -> None:
    for indent in (None, 1):
        content = json.dumps({"data": [text(1), text(2)]}, indent=indent)
        (found,) = problems(tmp_path, content, "a.json")
        assert 'the list under "data"' in found.fix and found.where.endswith("a.json:1")
    for value in (
        {"prompt": ["a", "b"], "completion": ["c", "d"]},
        {"prompt": {"0": "a"}, "text": {"0": "c"}},
    ):
        (found,) = problems(tmp_path, json.dumps(value), "b.json")
        assert "one JSON object of columns" in found.what and 'orient="records"' in found.fix


def test_one_row_may_go_over_many_lines_of_a_json_file(tmp_path) -> None:
    assert read(tmp_path, json.dumps(chat(1), indent=1), "a.json").report["train"].kept == 1
    (found,) = problems(tmp_path, json.dumps(chat(1), indent=1)[:-3] + ",\n}", "b.json")
    assert "not valid JSON" in found.what and found.where.endswith("b.json:12:1")
    several = problems(tmp_path, (json.dumps(chat(1), indent=1) + "\n") * 2, "c.json")
    assert "one example per line" in several[0].fix, "two of them are lines"


# ---- rows of several formats


def test_rows_of_two_formats_are_counted_and_the_fewer_ones_placed(tmp_path) -> None:
    rows = [text(n) if n in (6, 13, 20) else chat(n) for n in range(30)]
    (found,) = problems(tmp_path, rows)
    place = str(tmp_path / "rows.jsonl")
    assert found.where == f"{place}:7" and found.what.endswith("rows.jsonl has examples of 2 formats")
    assert f"27 examples are messages (first {place}:1)" in found.found
    assert f"3 examples are prompt_completion (first {place}:7)" in found.found
    assert "one file for each format" in found.fix
    allowed = read(tmp_path, rows, expect={"malformed": 0.1}).report["train"]
    said = "3 of 30 examples are malformed (" + place + ":7, :14, :21): this example has another format"
    assert allowed.kept == 27 and any(said in remark for remark in allowed.remarks())
    found, summary = problems(tmp_path, [text(0), *(chat(n) for n in range(9))])
    assert found.where == f"{place}:1", "the first row may be the odd one"
    assert "1 examples are prompt_completion" in found.found and "9 examples are messages" in found.found
    assert "9 of 10 examples" in summary.what


def test_both_kinds_of_conversations_in_one_file_are_two_formats(tmp_path) -> None:
    other = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    (found,) = problems(tmp_path, [chat(1), chat(2), other])
    assert "1 examples are sharegpt" in found.found and found.where.endswith(":3")


def test_a_row_that_lacks_nothing_is_not_said_to_have_another_format(tmp_path) -> None:
    (found,) = problems(tmp_path, [text(1), {**chat(1), "prompt": "a", "completion": ""}])
    assert found.what == "`completion` is empty"
    (found,) = problems(tmp_path, [chat(1), {"messages": None, "text": None}])
    assert found.what == "`messages` must be a list of messages"


def test_a_format_that_no_row_has_is_told_so(tmp_path) -> None:
    found, summary = problems(tmp_path, [chat(n) for n in range(9)], format="alpaca")
    assert "no example has the format" in found.what and "9 examples are messages" in found.found
    assert found.expected == "alpaca" and "9 of 9 examples" in summary.what


def test_a_folder_says_what_in_it_is_not_read(tmp_path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "more").mkdir()
    for name in ("b.jsonl.zst", "c.xlsx", "README.md", ".hidden"):
        (tmp_path / "rows" / name).write_text("")
    write(tmp_path / "rows" / "a.jsonl", [chat(1)])

    def prepared() -> Prepared:
        return prepared_of(tmp_path, str(tmp_path / "rows"))

    for _ in ("prepared", "found prepared"):
        remarks = prepared().report["train"].remarks()
        assert f"finetune ignores b.jsonl.zst, c.xlsx, more/ in {tmp_path / 'rows'}" in remarks
    (tmp_path / "rows" / "c.xlsx").unlink()
    found = prepared()
    assert found.cached and found.report["train"].passed_by == {
        str(tmp_path / "rows"): ["b.jsonl.zst", "more/"]
    }


# ---- roles


def test_all_roles_that_are_not_known_are_said_at_once(tmp_path) -> None:
    names = ["bot"] * 20 + ["Agent"] * 9 + ["wizard"]
    asked = [{"messages": [{"role": "customer", "content": "a"}, {**ANSWER, "role": name}]} for name in names]
    found, summary = problems(tmp_path, asked)
    assert found.what == "4 unknown roles" and found.where.endswith("rows.jsonl:1, message 0")
    assert (
        "customer in 30 examples (first :1" in found.found and "bot in 20 examples (first :1" in found.found
    )
    assert (
        "Agent in 9 examples (first :21" in found.found and "wizard in 1 examples (first :30" in found.found
    )
    assert found.fix == "role_map: {customer: user, bot: assistant, Agent: assistant, wizard: ...}"
    assert "30 of 30 examples" in summary.what
    mapped = {"customer": "user", "bot": "assistant", "Agent": "assistant", "wizard": "assistant"}
    expect = {"duplicates": 1}
    assert read(tmp_path, asked, role_map=mapped, expect=expect).report["train"].kept == 30


def test_other_faults_are_not_hidden_behind_the_first_ones(tmp_path) -> None:
    rows = [chat(n, content="") for n in range(20)] + [chat(20, content=5)]
    rows += [{"messages": [USER, {**ANSWER, "role": "bot"}]}, *(chat(n) for n in range(21, 40))]
    empty, number, role, summary = problems(tmp_path, rows)
    assert empty.what == "`content` is empty (in 20 examples)" and number.what == "`content` must be a string"
    assert role.fix == "role_map: {bot: assistant}" and "set data.expect.malformed: " in summary.fix


# ---- nothing left


@pytest.mark.parametrize(
    ("line", "helps"),
    [
        ("{'prompt': 'a', 'completion': 'b'}", "json.dumps"),
        ("some plain text", '{"text": ...}'),
        ('"some text"', '{"text": ...}'),
        (json.dumps([USER, ANSWER]), '{"messages": [...]}'),
        (json.dumps([text(1), text(2)]), ".json file"),
        (json.dumps(text(1)) + ",", "remove the comma"),
        (json.dumps(text(1)) + "\r" + json.dumps(text(2)), r"end lines with \n"),
        ("{\n", "one example per line"),
        ("{\0", "UTF-16"),
    ],
)
def test_where_no_row_can_be_read_what_is_tried_would_help(line: str, helps: str, tmp_path) -> None:
    found, *_, summary = problems(tmp_path, f"{line}\n" * 20)
    assert helps in found.fix, found
    assert (
        "20 of 20 examples" in summary.what
        and "expect" not in summary.fix
        and "no example is left" in summary.why
    )
    assert summary.key == "data.expect.unreadable"


@pytest.mark.parametrize("expect", [{}, {"malformed": 1}])
def test_where_every_row_is_malformed_no_limit_is_blamed(expect: dict[str, float], tmp_path) -> None:
    found, summary = problems(tmp_path, [{**text(n), "completion": ""} for n in range(20)], expect=expect)
    assert found.what == "`completion` is empty (in 20 examples)" and "max_length" not in str(summary)
    assert "data.expect.malformed: " not in summary.fix


def test_rows_without_an_answer_are_not_blamed_on_their_length(tmp_path) -> None:
    unanswered = [{"messages": [{**USER, "content": f"{n}"}]} for n in range(20)]
    first, found = problems(tmp_path, unanswered)
    assert "the last message is not from the assistant (in 20 examples)" in first.what
    assert found.key == "data.name" and "none of the 20 examples has an answer" in found.what
    assert "max_length" not in str(found) and "assistant's answer" in found.fix
    (found,) = problems(tmp_path, [chat(n, train=False) for n in range(20)])
    assert found.key == "data.name" and "`train` and `weight`" in found.fix and "max_length" not in str(found)
    _, found = problems(tmp_path, [*unanswered, chat(1, content="word " * 2000)])
    assert "data.max_length: " in found.fix and "assistant's answer" in found.fix, "each cause"
    *_, found = problems(tmp_path, "oops\n" + "".join(json.dumps(row) + "\n" for row in unanswered[:5]))
    assert "5 have no answer at the end" in found.found, "beside a line that can't be read"


# ---- one row


def test_a_key_that_stands_twice_is_an_error(tmp_path) -> None:
    """Python takes the last of the two, and says nothing."""
    line = '{"prompt": "a", "completion": "x", "completion": "y"}'
    (found,) = problems(tmp_path, line)
    assert 'the key "completion" has two values' in found.what and found.where.endswith("rows.jsonl:1")
    (found,) = problems(tmp_path, f"[{line}]", "a.json")
    assert 'the key "completion" has two values' in found.what


@pytest.mark.parametrize(
    "calls", ["[{broken", '"[1', [float("nan")], [{"name": "f", "x": float("nan")}]], ids=str
)
def test_tool_calls_that_are_no_json_are_an_error_of_their_row(calls: Any, tmp_path) -> None:
    (found,) = problems(tmp_path, [chat(1, tool_calls=calls)])
    assert "must be valid JSON" in found.what and found.where.startswith(str(tmp_path / "rows.jsonl:1"))


@pytest.mark.parametrize("arguments", [{"a": float("nan")}, '{"a": NaN}', '{"a": -Infinity}'])
def test_a_tool_call_with_a_number_that_json_has_not_is_an_error(arguments: Any, tmp_path) -> None:
    call = {"tool_calls": [{"name": "f", "arguments": arguments}]}
    (found,) = problems(tmp_path, [chat(1, **call)])
    assert "must be valid JSON" in found.what


def test_a_number_comes_with_how_to_write_it(tmp_path) -> None:
    (found,) = problems(tmp_path, [{**text(1), "completion": 12}])
    assert found.fix == 'write it as a string: "12"'
    (found,) = problems(tmp_path, [{**text(1), "completion": float("nan")}])
    assert not found.fix


def test_what_is_found_in_a_row_does_nothing_to_the_terminal(tmp_path) -> None:
    row = {"messages": [{"role": "\x1b[2J\x07\nerror: \u202eno", "content": "a"}]}
    (found,) = problems(tmp_path, [row])
    assert found.found == r"\x1b[2J\x07\nerror: \u202eno" and "\x1b" not in str(found)


def test_a_packed_file_or_a_sheet_comes_with_what_to_do(tmp_path) -> None:
    for name, helps in (("a.jsonl.zst", "unpack the file"), ("a.xlsx", ".csv"), ("a.tsv", ".csv")):
        (found,) = problems(tmp_path, "", name)
        assert helps in found.fix


# ---- what `finetune check` says of them


def checked(rows: Path, *options: str) -> int:
    few = "train.effective_batch_size=1"
    return main.main(["check", str(QUICKSTART), f"data.name={rows}", few, *options])


def test_check_reads_the_first_rows(tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.jsonl"
    write(rows, [*map(chat, range(3)), {"messages": [USER, {**ANSWER, "role": "bot"}]}, text(4), chat(5)])
    write(held := tmp_path / "held.csv", 'prompt,completion\na,b\n"c,d\n')
    assert checked(rows, f"data.validation={held}") == 2
    said = capsys.readouterr().err
    for part in (
        f"{rows}:4, message 1",
        "has examples of 2 formats",
        f"{rows}:5",
        "not valid CSV",
        f"{held}:3",
    ):
        assert part in said
    plan = ["plan", str(QUICKSTART), f"data.name={rows}", "data.validation=null", "--gpu", "l4"]
    assert main.main(plan) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "`finetune train` does not accept the data" in said and "note: unknown role (" in said
    assert "`finetune check` shows all problems" in said
    assert main.main([*plan, "data.expect.malformed=0.5"]) == 0
    assert "unknown role" not in capsys.readouterr().out
    assert checked(rows, "data.validation=null", "data.expect.malformed=0.5") == 0
    assert "checked all 6 examples without the tokenizer" in capsys.readouterr().out


def test_a_row_without_turns_lacks_those_of_its_format(tmp_path: Path) -> None:
    (lacks,) = problems(tmp_path, [chat(0), {"text": None}])
    assert lacks.what == "`messages` must be a list of messages"


def test_check_reads_no_more_than_the_first_rows(tmp_path: Path, capsys) -> None:
    write(rows := tmp_path / "rows.jsonl", [*map(chat, range(example_errors.FIRST)), {"messages": "none"}])
    assert checked(rows, "data.validation=null") == 0
    said = f"checked the first {example_errors.FIRST} examples of each source"
    assert said in capsys.readouterr().out
    assert checked(rows, "data.validation=null", "data.max_length=8") == 0, "the others may be shorter"
    said = f"warning: none of the first {example_errors.FIRST} training examples has a token to train on"
    assert said in capsys.readouterr().out
    write(rows, [*map(chat, range(example_errors.FIRST - 1)), {"messages": "none"}])
    assert checked(rows, "data.validation=null") == 2


def test_check_applies_the_limits_of_the_audit_to_examples_without_an_answer(tmp_path: Path, capsys) -> None:
    unanswered = [{"messages": [{**USER, "content": f"Who left {n}?"}]} for n in range(3)]
    write(rows := tmp_path / "rows.jsonl", [*map(chat, range(60)), *unanswered])
    assert checked(rows, "data.validation=null") == 0, "3 of 63 are fewer than data.expect.dropped allows"
    write(rows, [*map(chat, range(50)), *unanswered])
    assert checked(rows, "data.validation=null") == 2
    assert "the last message is not from the assistant" in capsys.readouterr().err
    write(good := tmp_path / "good.jsonl", [*map(chat, range(60, 69))])
    assert checked(good, f"data.validation={rows}") == 0, "evaluation leaves them out"
    write(rows, unanswered)
    assert checked(good, f"data.validation={rows}") == 2
    write(rows, [*unanswered, *map(chat, range(example_errors.FIRST))])
    assert checked(rows, "data.validation=null") == 0, "`check` has not read all examples"


def test_check_applies_a_limit_of_malformed_examples(tmp_path: Path) -> None:
    write(rows := tmp_path / "rows.jsonl", [*map(chat, range(8)), {"messages": None}, {"messages": None}])
    assert checked(rows, "data.validation=null", "data.expect.malformed=0.2") == 0
    assert checked(rows, "data.validation=null", "data.expect.malformed=0.1") == 2


@pytest.mark.parametrize(
    ("where", "file"),
    [
        ("a!b/x.jsonl:3", "a!b/x.jsonl"),
        ("x.parquet[12]", "x.parquet"),
        ("d/x.tar!a!b.json", "d/x.tar"),
        ("d!/x.tar.gz!1", "d!/x.tar.gz"),
        ("me/rows train[7]", "me/rows train"),
    ],
)
def test_file_of_a_row_is_found_under_any_name(where: str, file: str) -> None:
    assert file_of(where) == file
