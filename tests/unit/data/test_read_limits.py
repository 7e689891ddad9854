"""The limits of what is read at once, which a recipe sets."""

from __future__ import annotations

import gzip
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import UserError
from finetune.data import read_limits, readers, source_loading
from finetune.data.examples import Row
from finetune.data.read_limits import Limits
from finetune.recipe.schema import Data, Source

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["a", "b\n, ]", "c" * 300, "\u00e9", ""]


def write(path: Path, texts: list[str]) -> None:
    """A file of rows, each with a text."""
    rows: list[dict[str, Any]] = [{"text": text} for text in texts]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".csv":
        path.write_text("text\n" + "\n".join(json.dumps(text) for text in texts))
    elif path.suffix == ".txt":
        path.write_text("\n".join(texts))
    elif path.suffix == ".tar":
        with tarfile.open(path, "w:gz") as archive:
            for number, text in enumerate(texts):
                (path.parent / "one").write_text(text)
                archive.add(path.parent / "one", f"{number}.txt")
    else:
        write_columns(path, rows)


def write_columns(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
        return
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
        file.write_table(table)


@pytest.mark.parametrize("suffix", list(readers.READERS))
def test_an_example_over_the_limit_is_refused_and_a_higher_limit_reads_it(suffix: str, tmp_path) -> None:
    write(path := tmp_path / f"a{suffix}", ["short", "x" * 5000])
    data = Data(name=str(path), max_example_bytes=3000)
    (source,) = source_loading.sources(data)
    with pytest.raises(UserError, match=r"data\.max_example_bytes: 6000"):
        list(source_loading.read(source, "data.name"))
    (source,) = source_loading.sources(data.model_copy(update={"max_example_bytes": 20_000}))
    assert all(isinstance(row, Row) for row in source_loading.read(source, "data.name"))
    own = data.model_copy(update={"name": [Source(name=str(path), max_example_bytes=20_000)]})
    assert list(source_loading.read(source_loading.sources(own)[0], "data.name"))
    with pytest.raises(UserError, match=r"data\.max_example_bytes"):
        list(
            source_loading.read(
                source_loading.validation_source(Data(name="-", validation=str(path), max_example_bytes=9)),
                "data.validation",
            )
        )


@pytest.mark.parametrize("suffix", [".tar", ".parquet", ".arrow"])
def test_a_file_that_expands_over_the_limit_is_refused(suffix: str, tmp_path) -> None:
    write(path := tmp_path / f"a{suffix}", ["x" * 5000] * 40)
    with pytest.raises(UserError, match=r"data\.max_uncompressed_bytes: 10000"):
        list(readers.read_file(path, Limits(uncompressed=1000)))
    assert len(list(readers.read_file(path, Limits(uncompressed=10**6)))) == 40


def test_values_of_a_dictionary_count_in_each_row(tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), ["x" * 10_000])
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    limits = Limits(uncompressed=2 * 10**6)
    with pytest.raises(UserError, match="expands to too many bytes"):
        list(readers.read_file(tmp_path / "a.parquet", limits))


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_a_large_array_is_read_as_a_small_one(indent: int | None, chunk: int, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": text, "n": [1, {"a": None}]} for text in TEXTS], indent=indent))
    small = list(readers.read_file(path))
    monkeypatch.setattr(readers, "_CHUNK", chunk)
    assert list(readers.read_file(path, Limits(example=path.stat().st_size - 1))) == small


@pytest.mark.parametrize("text", ["[", "[{}", "[{},", "[{} {}]", "[{}] {}", "[{},,{}]", "[nul]", '[{"a": 1'])
def test_a_large_array_that_is_broken_is_refused(text: str, tmp_path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(text + " " * 100)
    with pytest.raises(UserError, match=r"a\.json"):
        list(readers.read_file(path, Limits(example=50)))


def test_default_limits_let_a_compressed_file_expand_a_hundred_times(tmp_path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(bytes(10)))
    assert Limits().expanded(path) == read_limits.LEAST
    with path.open("wb") as file:
        file.truncate(2**30)
    assert Limits().expanded(path) == 100 * 2**30
