"""Examples of very many turns, columns, tools or calls: each ends with an error, soon."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.core.errors import UserError
from finetune.data import arrow_values, chat_templates, formats, json_values, readers
from finetune.data.encoding import Encoded, make_encoder
from finetune.data.examples import BadRow, Row
from finetune.recipe.schema import Data
from support.chat_tokenizers import tokenizer_with
from support.limited_commands import SECONDS
from support.paths import QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANY = 200_000
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL = {"name": "a", "parameters": {}}
PART = {"type": "text", "text": "a"}
CALL = {"function": {"name": "a", "arguments": {}}}


def called(calls: Any) -> list[dict[str, Any]]:
    """A chat whose answer has tool calls."""
    return [CHAT[0], {"role": "assistant", "content": "", "tool_calls": calls}, *CHAT]


JSON_OF_MANY = json.dumps({"a": list(range(MANY))})
MANY_KEYS = {f"k{number}": 1 for number in range(MANY)}
EXAMPLES: dict[str, dict[str, Any]] = {
    "turns": {"messages": CHAT * (MANY // 2)},
    "turns as JSON text": {"messages": json.dumps(CHAT * (MANY // 2))},
    "columns": {"messages": CHAT, **MANY_KEYS},
    "keys of a turn": {"messages": [{**CHAT[0], **MANY_KEYS}, CHAT[1]]},
    "parts of a turn": {"messages": [{"role": "user", "content": [PART] * MANY}, CHAT[1]]},
    "tools": {"messages": CHAT, "tools": [TOOL] * (MANY // 2)},
    "tools as JSON text": {"messages": CHAT, "tools": json.dumps([TOOL] * (MANY // 2))},
    "tools, each as JSON text": {"messages": CHAT, "tools": [json.dumps(TOOL)] * (MANY // 4)},
    "tool calls": {"messages": called([CALL] * (MANY // 2))},
    "arguments": {"messages": called([{"function": {"name": "a", "arguments": MANY_KEYS}}])},
    "arguments as JSON text": {"messages": called([{"function": {"name": "a", "arguments": JSON_OF_MANY}}])},
    "history": {"instruction": "a", "output": "b", "history": [["a", "b"]] * (MANY // 2)},
    "system parts": {"messages": CHAT, "system": [PART] * MANY},
    "prompt and completion": {"prompt": CHAT[:1] * MANY, "completion": CHAT[1:]},
    "an unused column": {"messages": CHAT, "other": list(range(MANY))},
}  # fmt: skip
IN_CI = ["turns", "columns", "tools, each as JSON text"]


@pytest.mark.parametrize(
    ("name", "suffix"),
    soak_except(
        [(name, "jsonl") for name in IN_CI],
        [("turns", "parquet"), *((name, suffix) for name in EXAMPLES for suffix in ("jsonl", "json"))],
    ),
)
def test_example_of_very_many_values_is_refused(name: str, suffix: str, tmp_path, commands) -> None:
    path = write(EXAMPLES[name], tmp_path / f"data.{suffix}")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong, ended  # `check` leaves out examples that are too long for its sample
    with pytest.raises((BadRow, UserError), match=r"too many values|too large to read"):
        convert_first(path)


def lists_of(values: pyarrow.Array, rows: int = 1) -> pyarrow.Array:
    """Lists of equal length that hold all values together."""
    starts = [len(values) // rows * row for row in range(rows + 1)]
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(starts, pyarrow.int64()), values)


def repeated(value: Any, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    return pyarrow.array([value], kind).take(pyarrow.array(bytes(count), pyarrow.uint8()))


COLUMNS: dict[str, Callable[[int], pyarrow.Array]] = {
    "booleans": lambda count: repeated(True, pyarrow.bool_(), count),
    "integers": lambda count: repeated(7, pyarrow.int8(), count),
    "dates": lambda count: repeated(7, pyarrow.timestamp("us"), count // 8),
    "empty lists": lambda count: repeated([], pyarrow.list_(pyarrow.int8()), count // 4),
    "structs": lambda count: repeated(
        {"a": True, "b": True}, pyarrow.struct({"a": pyarrow.bool_(), "b": pyarrow.bool_()}), count // 2
    ),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("name", soak_except(["booleans", "structs"], COLUMNS))
def test_row_of_millions_of_values_is_refused_before_python_creates_them(
    name: str, suffix: str, tmp_path, commands
) -> None:
    """A parquet file of 1,000 bytes can hold 30 million values."""
    path = tmp_path / f"data.{suffix}"
    write_table({"messages": pyarrow.array([CHAT]), "other": lists_of(COLUMNS[name](20_000_000))}, path)
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and ended.code == 2, ended
    assert any(said in ended.said for said in ("too many values", "an example is too large")), ended


def test_check_of_many_rows_of_many_values_ends_soon(tmp_path, commands) -> None:
    rows = 200
    values = lists_of(COLUMNS["booleans"](99_000 * rows), rows)
    path = tmp_path / "data.arrow"
    write_table({"messages": pyarrow.array([CHAT] * rows), "other": values}, path)
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong, ended


def test_dictionary_whose_values_are_lists_is_refused(tmp_path, commands) -> None:
    """Each row can repeat a list that the file stores once."""
    shared = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array([list(range(90_000))])
    )
    path = tmp_path / "data.arrow"
    write_table({"messages": pyarrow.array([CHAT] * 1000), "other": shared}, path)
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and ended.code == 2 and "finetune can't read the Arrow" in ended.said, ended


NESTED = {
    "list": [[1, 2, None]],
    "map": [[("a", 1), ("b", 2)], [("c", 3)], None],
    "struct": [{"a": [1, 2], "b": {"c": 3}}],
    "text": ["abc", None],
}
TYPES = {"map": pyarrow.map_(pyarrow.string(), pyarrow.int64())}


@pytest.mark.parametrize("name", NESTED)
def test_values_of_a_batch_are_counted_as_those_of_its_rows(name: str) -> None:
    column = pyarrow.array(NESTED[name] * 2, TYPES.get(name))
    batch = pyarrow.RecordBatch.from_arrays([column, column], ["a", "b"])

    def count(value: Any) -> int:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return len(parts) + sum(map(count, parts))

    for part in (batch, batch.slice(1), batch.slice(0, 1)):
        rows = part.to_pylist(maps_as_pydicts="strict")
        assert arrow_values.count_values(part) == sum(map(count, rows))


def write_table(columns: dict[str, pyarrow.Array], path: Path) -> None:
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


@pytest.mark.parametrize("name", soak_except(["turns"], EXAMPLES))
def test_example_within_the_limit_ends_soon(name: str, tmp_path, commands) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(cut(EXAMPLES[name], 7)) + "\n")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and "too many values" not in ended.said, ended


def turns(number: int) -> list[dict[str, Any]]:
    """A question and an answer that no other turn repeats."""
    return [{"role": "user", "content": f"ask {number}"}, {"role": "assistant", "content": f"say {number}"}]


def called_one_by_one(calls: int) -> list[dict[str, Any]]:
    """A chat with one message of many tool calls, each with another name."""
    functions = [{"name": f"f{number}", "arguments": {}} for number in range(calls)]
    return called([{"type": "function", "function": function} for function in functions])


PREPARED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "turns": ([turn for number in range(12_000) for turn in turns(number)], "chatml"),
    "reasoning that the template omits": (
        [{**turn, "reasoning_content": f"think {n}"} for n in range(8_000) for turn in turns(n)],
        "chatml",
    ),
    "tool calls": (called_one_by_one(10_000), "mistral"),
    "parts with weights": (
        [
            CHAT[0],
            {
                "role": "assistant",
                "content": [{"type": "text", "text": f"a{n} ", "weight": n % 2 / 2} for n in range(20_000)],
            },
        ],
        "chatml",
    ),
}


@pytest.mark.parametrize("name", PREPARED)
def test_encoding_of_an_example_of_many_values_ends_soon(name: str) -> None:
    """Each step takes linear time. 30,000 turns took 20 s."""
    messages, template = PREPARED[name]
    data = Data(name="a.jsonl")
    row = Row({"messages": messages}, "a.jsonl:1")
    encoder = make_encoder(tokenizer_with(chat_templates.read_template(template)), data, chats=True)
    started = time.process_time()
    (found,) = encoder([formats.convert(row, data, formats.detect(row, data))])
    assert time.process_time() - started < 2 * SECONDS  # with other tests beside it
    assert isinstance(found, Encoded) or found.problem.code == "data-lost"


def convert_first(path: Path) -> None:
    row = next(iter(readers.read_file(path)))
    if isinstance(row, BadRow):
        raise row
    data = Data(name=str(path))
    formats.convert(row, data, formats.detect(row, data))


def cut(value: Any, part: int) -> Any:
    """A value whose long lists and mappings have a part of their entries; JSON text stays JSON."""
    if isinstance(value, str):
        return json.dumps(cut(json.loads(value), part)) if value[:1] in ("[", "{") else value
    if isinstance(value, dict):
        kept = list(value.items())[: max(8, len(value) // part)]
        return {key: cut(one, part) for key, one in kept}
    return (
        [cut(one, part) for one in value[: max(8, len(value) // part)]] if isinstance(value, list) else value
    )


def write(example: dict[str, Any], path: Path) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([example]), path)
    else:
        path.write_text(json.dumps([example] if path.suffix == ".json" else example) + "\n")
    return path


def test_example_of_millions_of_tokens_is_refused_by_default(tmp_path, commands) -> None:
    """A tokenizer takes 450 bytes of memory for each token: 10 MB of text took 4.5 GB."""
    path = write({"text": "a " * 5_000_000}, tmp_path / "data.jsonl")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and ended.code == 2 and "data.max_example_bytes: 8388608" in ended.said, ended


def test_csv_of_very_many_columns_is_refused(tmp_path, commands) -> None:
    path = tmp_path / "data.csv"
    path.write_text(",".join(MANY_KEYS) + "\n" + ",".join("1" * MANY) + "\n")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and ended.code == 2 and "too many values" in ended.said, ended


def test_key_that_stands_twice_among_many_is_found_soon(tmp_path, commands) -> None:
    keys = [*MANY_KEYS, f"k{MANY - 1}"]
    path = tmp_path / "data.jsonl"
    path.write_text("{" + ", ".join(f'"{key}": 1' for key in keys) + "}\n")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and ended.code == 2 and "has two values" in ended.said, ended


@pytest.mark.parametrize(("count", "too_many"), [(0, False), (1, True)])
def test_values_are_counted_in_lists_and_mappings(count: int, too_many: bool) -> None:
    value = {"a": [0] * (json_values.MOST_VALUES - 3), "b": [1] + [2] * count}
    assert bool(json_values.size_error(value, "here")) is too_many
