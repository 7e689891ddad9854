"""The limits of what is read at once, which a recipe sets."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import random
import tarfile
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from finetune.core.errors import UserError
from finetune.data import page_sizes, read_limits, readers, source_loading
from finetune.data.examples import BadRow, Row
from finetune.data.read_limits import Limits
from finetune.recipe.schema import Data, Source

if TYPE_CHECKING:
    from collections.abc import Callable
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


@pytest.mark.parametrize("suffix", readers.PLAIN)
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
    with pytest.raises(UserError, match="the uncompressed file is too large"):
        list(readers.read_file(tmp_path / "a.parquet", limits))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    "compress",
    [partial(lzma.compress, format=kind) for kind in (lzma.FORMAT_XZ, lzma.FORMAT_ALONE)],
)
def test_archive_of_xz_is_read_whole(pieces: int, compress: Callable[[bytes], bytes], tmp_path) -> None:
    texts = [random.Random(number).randbytes(40_000).hex() for number in range(4)]
    with tarfile.open(tmp_path / "plain", "w") as archive:
        for number, text in enumerate(texts):
            (tmp_path / "one").write_text(text)
            archive.add(tmp_path / "one", f"{number}.txt")
    plain = (tmp_path / "plain").read_bytes()
    cuts = [len(plain) * piece // pieces for piece in range(pieces + 1)]
    path = tmp_path / "a.tar"
    path.write_bytes(b"".join(compress(plain[a:b]) for a, b in pairwise(cuts)))
    assert [row.value["text"] for row in readers.read_file(path) if isinstance(row, Row)] == texts
    path.write_bytes(path.read_bytes()[:-50_000])
    with pytest.raises(UserError, match=r"cut off|damaged"):
        list(readers.read_file(path))


def test_texts_of_views_count_in_each_row(tmp_path) -> None:
    """Arrow's string_view, in which polars writes: many rows may share one text."""
    import numpy as np
    import pyarrow as pa

    text = b"x" * 10_000
    views = np.zeros((5000, 4), dtype=np.int32)
    views[:, 0], views[:, 1] = len(text), int.from_bytes(text[:4], "little")
    shared = pa.Array.from_buffers(pa.string_view(), 5000, [None, pa.py_buffer(views), pa.py_buffer(text)])
    for count, column in ((5000, shared), (3, pa.array(["a", None, "b" * 20], pa.string_view()))):
        batch = pa.record_batch([column], names=["text"])
        with pa.ipc.new_file(tmp_path / f"{count}.arrow", batch.schema) as file:
            file.write_batch(batch)
    rows = list(readers.read_file(tmp_path / "3.arrow"))
    assert [row.value for row in rows if isinstance(row, Row)] == [{"text": "a"}, {}, {"text": "b" * 20}]
    with pytest.raises(UserError, match="the uncompressed file is too large"):
        list(readers.read_file(tmp_path / "5000.arrow", Limits(uncompressed=2 * 10**6)))


def test_pages_of_a_parquet_file_have_the_sizes_of_the_footer(tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table(
        {
            "text": [f"{n}" * (n % 700) for n in range(20_000)],
            "n": list(range(20_000)),
            "b": [None, True] * 10_000,
        }
    )
    path = tmp_path / "a.parquet"
    for version, codec in (("1.0", "zstd"), ("2.0", "snappy"), ("2.0", "none")):
        parquet.write_table(table, path, data_page_version=version, compression=codec, write_statistics=False)
        with pa.memory_map(str(path)) as content:
            group = parquet.ParquetFile(content).metadata.row_group(0)
            for number in range(3):
                column = group.column(number)
                pages = page_sizes.of_column(content, column)
                headers = column.total_uncompressed_size - sum(pages)  # the footer counts them too
                assert 0 < headers < 60 * len(pages) and (number or len(pages) > 5)


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


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("{'a': 1}", "property name"),
        ('{"a" 1}', "delimiter"),
        ('{"a": 1, "a": 2}', "two values"),
        ('{"a": ' + "[" * 5000, "recursion"),
        ("{} x", "neither"),
    ],
)
def test_a_fault_in_a_large_array_is_named_with_its_place(fault: str, what: str, tmp_path) -> None:
    """Not as an example that is too long."""
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, ' + fault + ', {"text": "b"}' * 3000 + "]")
    with pytest.raises(UserError, match=what) as raised:
        list(readers.read_file(path, Limits(example=30_000)))
    assert f"{path}[1]" in str(raised.value)


def test_default_limits_let_a_compressed_file_expand_a_hundred_times(tmp_path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(bytes(10)))
    assert Limits().expanded(path) == read_limits.LEAST
    with path.open("wb") as file:
        file.truncate(2**30)
    assert Limits().expanded(path) == 100 * 2**30


@pytest.mark.parametrize("size", [100, 100_000])
def test_array_that_is_not_utf8_is_refused_with_its_place(size: int, tmp_path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "' + b"a" * size + b'"},\n{"text": "caf\xe9"}]')
    with pytest.raises(UserError, match=r"not UTF-8") as raised:
        list(readers.read_file(path, Limits(example=1000 if size < 1000 else 50_000)))
    assert raised.value.problems[0].where.startswith(f"{path}:2")


def test_members_of_an_archive_that_stand_twice_are_no_example(tmp_path) -> None:
    path, made = tmp_path / "a.tar", {"prompt": "Capital of France?", "completion": "Paris"}
    other = {"prompt": "Capital of Italy?"}
    with tarfile.open(path, "w") as archive:
        for name, content in (
            ("a.json", made),
            ("a.json", other),
            ("b.json", made),
            ("c.json", made),
            ("b.json", made),
        ):
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    rows = list(readers.read_file(path))
    assert [type(row) for row in rows] == [BadRow, Row, Row, BadRow]


def test_deeply_nested_row_is_refused_in_each_format(tmp_path) -> None:
    deep = "[" * 150 + "]" * 150
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "b": {deep}}}\n')
    (tmp_path / "a.json").write_text(f'[{{"text": "a", "b": {deep}}}]')
    (tmp_path / "b.json").write_text(f'[{{"text": "a", "b": {deep}}},\n{{"text": "{"a" * 2000}"}}]')
    for name, limits in (("a.jsonl", Limits()), ("a.json", Limits()), ("b.json", Limits(example=2100))):
        first, *_ = readers.read_file(tmp_path / name, limits)
        assert isinstance(first, BadRow) and "nested" in first.problem.what
