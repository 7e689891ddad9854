"""Examples of very many turns, columns, tools or calls: each ends with an error, soon."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest

from finetune.data import formats, json_values, readers
from finetune.data.examples import BadRow
from finetune.recipe.schema import Data
from support.limited_commands import LimitedCommands
from support.paths import QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANY = 200_000
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL = {"name": "a", "parameters": {}}
PART = {"type": "text", "text": "a"}
CALL = {"function": {"name": "a", "arguments": {}}}


@pytest.fixture(scope="module")
def commands() -> Iterator[LimitedCommands]:
    with LimitedCommands("pyarrow.parquet", "tokenizers") as running:
        yield running


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
    with pytest.raises(BadRow, match="too many values"):
        convert_first(path)


@pytest.mark.parametrize("name", soak_except(["turns"], EXAMPLES))
def test_example_within_the_limit_ends_soon(name: str, tmp_path, commands) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(cut(EXAMPLES[name], 6)) + "\n")
    ended = commands.run("check", str(QUICKSTART), f"data.name={path}", "data.format=auto")
    assert not ended.wrong and "too many values" not in ended.said, ended


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
    assert not ended.wrong and ended.code == 2 and "two values of the key" in ended.said, ended


@pytest.mark.parametrize(("count", "too_many"), [(0, False), (1, True)])
def test_values_are_counted_in_lists_and_mappings(count: int, too_many: bool) -> None:
    value = {"a": [0] * (json_values.MOST_VALUES - 3), "b": [1] + [2] * count}
    assert json_values.has_too_many_values(value) is too_many
