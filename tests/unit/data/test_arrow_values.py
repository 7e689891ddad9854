"""Columns of Arrow extension types give what `datasets` gives, or end in an error that names the type."""

import json
import uuid
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from datasets import Array2D, Dataset, Features, Json, List, Value
from pyarrow import ipc, parquet

from finetune.core.errors import UserError
from finetune.data import hub_datasets, source_loading, streaming
from finetune.data.examples import BadRow, Row
from finetune.data.read_limits import DEFAULT
from finetune.recipe.schema import Source

ARGUMENTS: list[Any] = [{"time": "x"}, {"time": 5}, {"when": [1, "a", None], "deep": {"a": None}}, {}]


def chat(arguments: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "t?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": '{"looks": "like JSON"}'},
            {"role": "assistant", "content": "done"},
        ]
    }


def mixed(folder: Path) -> Any:
    """The dataset that `datasets` makes of tool arguments of several types: it chooses Json by itself."""
    lines = "".join(json.dumps(chat(arguments)) + "\n" for arguments in ARGUMENTS)
    (folder / "mixed.jsonl").write_text(lines)
    given: dict[str, Any] = {
        "data_files": str(folder / "mixed.jsonl"),
        "split": "train",
        "cache_dir": str(folder / "hf"),
    }
    return datasets.load_dataset("json", **given)


def values(path: Path) -> list[Any]:
    rows = list(source_loading.read(Source(name=str(path)), "data.name"))
    assert all(isinstance(row, Row) for row in rows), rows
    return [row.value for row in rows if isinstance(row, Row)]


def saved(table: Any, folder: Path, kind: str) -> Path:
    """A dataset or table as a parquet file, an arrow file of either format, or a saved folder."""
    if isinstance(table, Dataset):
        path = folder / ("saved" if kind == "save_to_disk" else f"rows.{kind}")
        table.save_to_disk(str(path)) if kind == "save_to_disk" else table.to_parquet(str(path))
        return path
    path = folder / f"rows.{kind.partition(' ')[0]}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        new = ipc.new_file if kind == "arrow file" else ipc.new_stream
        with pyarrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_read_tool_arguments_of_several_types_gives_those_of_the_jsonl(kind: str, tmp_path: Path) -> None:
    table = mixed(tmp_path)
    assert "Json" in str(table.features)
    assert values(saved(table, tmp_path, kind)) == values(tmp_path / "mixed.jsonl")


def test_streaming_decodes_json_columns_too(tmp_path: Path) -> None:
    path = saved(mixed(tmp_path), tmp_path, "parquet")
    rows = streaming._read((str(path), 0, path.stat().st_size, DEFAULT))
    assert [row.value for row in rows if isinstance(row, Row)] == values(tmp_path / "mixed.jsonl")


JSON: dict[str, Any] = {  # feature -> the value
    "prompt": (List(Json()), [{"role": "user", "content": "{}"}]),
    "completion": (Json(), [{"role": "assistant", "content": "a"}]),
    "tools": (Json(), [{"name": "f", "parameters": {"x": [1, None, "y"]}}]),
    "text": (Value("string"), '{"role": "user"}'),
    "large": (Value("large_string"), "[1]"),
    "number": (Json(), 5),
    "word": (Json(), "word"),
    "inner": ({"a": List({"b": Json(), "c": Value("string")})}, {"a": [{"b": {"d": 1}, "c": "{}"}]}),
    "fixed": (List(Json(), length=2), [{"a": 1}, [2]]),
    "matrix": (Array2D((2, 2), "int32"), [[1, 2], [3, 4]]),
}


@pytest.mark.parametrize("kind", ["parquet", "save_to_disk"])
def test_read_json_at_any_depth_gives_what_datasets_gives(kind: str, tmp_path: Path) -> None:
    features = Features({name: feature for name, (feature, _) in JSON.items()})
    row = {name: value for name, (_, value) in JSON.items()}
    path = saved(Dataset.from_list([row, row], features=features), tmp_path, kind)
    assert values(path) == [row, row]


def of_type(kind: Any, storage: list[Any]) -> pyarrow.Table:
    column = pyarrow.ExtensionArray.from_storage(kind, pyarrow.array(storage, kind.storage_type))
    return pyarrow.table({"text": ["a"] * len(storage), "column": column})


KINDS = ["parquet", "arrow file", "arrow stream"]
KEY = uuid.UUID(int=7)
DECODED: dict[str, Any] = {
    "json": (pyarrow.json_(), '{"a": null}', {"a": None}),
    "json of a large string": (pyarrow.json_(pyarrow.large_string()), "[1]", [1]),
    "uuid": (pyarrow.uuid(), KEY.bytes, str(KEY)),
    "bool8": (pyarrow.bool8(), 1, True),
    "vector": (pyarrow.fixed_shape_tensor(pyarrow.int32(), [2]), [1, 2], [1, 2]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODED)
def test_read_known_extension_type_is_decoded(name: str, kind: str, tmp_path: Path) -> None:
    extension, storage, expected = DECODED[name]
    assert values(saved(of_type(extension, [storage, None]), tmp_path, kind)) == [
        {"text": "a", "column": expected},
        {"text": "a"},
    ]


OTHERS: dict[str, Any] = {
    "arrow.opaque": (pyarrow.opaque(pyarrow.binary(), "geometry", "postgis"), b"text"),
    "arrow.fixed_shape_tensor": (pyarrow.fixed_shape_tensor(pyarrow.int32(), [1, 2]), [1, 2]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OTHERS)
def test_read_other_extension_type_is_an_error_that_names_it(name: str, kind: str, tmp_path: Path) -> None:
    extension, storage = OTHERS[name]
    with pytest.raises(UserError, match=rf"the Arrow extension type {name} of the column column"):
        values(saved(of_type(extension, [storage]), tmp_path, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_read_extension_type_that_pyarrow_does_not_know_is_an_error(kind: str, tmp_path: Path) -> None:
    named = {b"ARROW:extension:name": b"somebody.encrypted", b"ARROW:extension:metadata": b""}
    inner = pyarrow.struct([pyarrow.field("content", pyarrow.string(), metadata=named)])
    messages = pyarrow.array([[{"content": "c2VjcmV0"}]], pyarrow.list_(inner))
    with pytest.raises(UserError, match=r"somebody.encrypted of the column messages.content"):
        values(saved(pyarrow.table({"messages": messages}), tmp_path, kind))


def test_read_parquet_json_without_arrow_schema_is_decoded(tmp_path: Path) -> None:
    """As other writers mark it (DuckDB): by parquet's own logical type."""
    parquet.write_table(of_type(pyarrow.json_(), ['{"a": 1}']), tmp_path / "a.parquet", store_schema=False)
    assert values(tmp_path / "a.parquet") == [{"text": "a", "column": {"a": 1}}]


def test_read_map_gives_a_mapping(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.json_())
    storage = pyarrow.map_(pyarrow.string(), pyarrow.string())
    column = pyarrow.array([[("a", '{"b": 1}'), ("c", "2")]], storage).cast(kind)
    assert values(saved(pyarrow.table({"m": column}), tmp_path, "parquet")) == [
        {"m": {"a": {"b": 1}, "c": 2}}
    ]


@pytest.mark.parametrize("content", ["{", "", '{"a": 1, "a": 2}', r'"\ud800"'])
def test_read_invalid_json_is_a_bad_row_with_its_place(content: str, tmp_path: Path) -> None:
    path = saved(of_type(pyarrow.json_(), ['{"a": 1}', content]), tmp_path, "parquet")
    good, bad = source_loading.read(Source(name=str(path)), "data.name")
    assert isinstance(good, Row) and isinstance(bad, BadRow)
    assert bad.kind == "unreadable" and bad.problem.where == f"{path}[1]"


def test_hub_dataset_gives_the_same_rows_as_its_files(tmp_path: Path, datasets_hub) -> None:
    mixed(tmp_path).to_parquet(str(tmp_path / "train.parquet"))
    datasets_hub.add("me/mixed", **{"train.parquet": (tmp_path / "train.parquet").read_bytes()})
    source = Source(name="me/mixed", split="train")
    rows = [row.value for row in hub_datasets.rows(source) if isinstance(row, Row)]
    assert rows == values(tmp_path / "mixed.jsonl")


def test_read_json_beside_values_that_json_has_no_form_for_is_a_row(tmp_path: Path) -> None:
    when = pyarrow.array([datetime(2024, 1, 2)], pyarrow.timestamp("us"))
    days = pyarrow.map_(pyarrow.date32(), pyarrow.int64())
    columns = {"when": when, "blob": pyarrow.array([b"a"]), "days": pyarrow.array([[(3, 4)]], days)}
    table = of_type(pyarrow.json_(), ['{"a": 1}'])
    for name, column in columns.items():
        table = table.append_column(name, column)
    (row,) = values(saved(table, tmp_path, "parquet"))
    assert row["column"] == {"a": 1} and row["when"] == datetime(2024, 1, 2) and row["blob"] == b"a"


KEY_TWICE = pyarrow.array([[("a", 1)], [("a", 1), ("a", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
LATE_YEAR = pyarrow.array([0, 2**50], pyarrow.timestamp("ms"))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (KEY_TWICE, "duplicate key was 'a'"),
        (LATE_YEAR, "date value out of range"),
    ],
)
def test_read_value_that_python_cannot_hold_is_a_bad_row(column: Any, said: str, tmp_path: Path) -> None:
    path = saved(pyarrow.table({"text": ["a", "b"], "column": column}), tmp_path, "arrow file")
    good, bad = source_loading.read(Source(name=str(path)), "data.name")
    assert isinstance(good, Row) and isinstance(bad, BadRow)
    assert (bad.kind, bad.problem.where) == ("unreadable", f"{path}[1]") and said in bad.problem.what


def test_hub_dataset_with_a_late_year_gives_a_bad_row(tmp_path: Path, datasets_hub) -> None:
    path = saved(pyarrow.table({"text": ["a", "b"], "column": LATE_YEAR}), tmp_path, "parquet")
    datasets_hub.add("me/late", **{"train.parquet": path.read_bytes()})
    good, bad = hub_datasets.rows(Source(name="me/late", split="train"))
    assert isinstance(good, Row) and isinstance(bad, BadRow) and "can't be read" in bad.problem.what


@pytest.mark.parametrize("kind", KINDS)
def test_two_columns_of_one_name_are_an_error(kind: str, tmp_path: Path) -> None:
    columns = [pyarrow.array([text] * 3) for text in ("q", "a", "evil")]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "completion", "completion"])
    with pytest.raises(UserError, match="two columns have the same name") as raised:
        values(saved(table, tmp_path, kind))
    assert raised.value.problems[0].found == "completion"
