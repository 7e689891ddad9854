"""Files that would hang a command or fill memory: each is answered with an error, soon."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import socket
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.limited_commands import LimitedCommands
from support.paths import MODEL, QUICKSTART

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 2**20


@pytest.fixture(scope="module")
def commands() -> Iterator[LimitedCommands]:
    with LimitedCommands("pyarrow.parquet", "tokenizers") as running:
        yield running


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)  # a socket's path has at most 107 bytes
        bound.bind(path.name)
        os.fchdir(here)
        os.close(here)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(200 * 2**30)


KINDS = (pipe, bound_socket, device, sparse)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((f"a{suffix}", "data.name={path}") for suffix in (".jsonl", ".json", ".csv", ".tar", ".txt")),
        *((f"a{suffix}", "data.name={path}") for suffix in (".parquet", ".arrow")),
        ("a.jsonl", "data.validation={path}"),
        ("a.txt", "eval.forgetting={path}"),
        ("a.yaml", "eval.tasks=[{path}]"),
        ("a.jinja", "data.chat_template={path}"),
        ("recipe.yaml", ""),
    ],
)
def test_a_file_of_a_recipe_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], name: str, words: str, tmp_path, commands
) -> None:
    make(path := tmp_path / name)
    recipe, *overrides = [str(path)] if not words else [str(QUICKSTART), words.format(path=path)]
    ended = commands.run("check", recipe, *overrides)
    assert not ended.wrong and ended.code == 2, ended


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_a_file_of_a_model_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path, commands
) -> None:
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (folder / name).unlink(missing_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    make(folder / name)
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}")
    assert not ended.wrong and ended.code == 2, ended
    assert name in ended.said


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_an_adapter_that_is_no_regular_file_is_refused(
    make: Callable[[Path], None], name: str, tmp_path, commands
) -> None:
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "base_model_name_or_path": str(MODEL)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    (tmp_path / name).unlink()
    make(tmp_path / name)
    ended = commands.run("check", str(QUICKSTART), f"adapter.init_from={tmp_path}")
    assert not ended.wrong and ended.code == 2, ended


def long_line(path: Path) -> None:
    line = b'{"messages": [{"role": "user", "content": "' + b"a" * (200 * MIB) + b'"}]}\n'
    path.write_bytes(line)


def many_brackets(path: Path) -> None:
    path.write_bytes(b"[" * (60 * MIB))


def deep_line(path: Path) -> None:
    levels = (300, 480, 600, 800, 900, 960, 980, 990, 1000, 2000, 100_000)
    texts = (b'{"messages":' + b"[" * count + b"1" + b"]" * count + b"}" for count in levels)
    more = (b'{"messages":' + b'{"a":' * count + b"1" + b"}" * count + b"}" for count in levels)
    path.write_bytes(b"\n".join([*texts, *more]) + b"\n")


def empty_lists(path: Path) -> None:
    path.write_bytes(b"[" + b"[]," * (30 * MIB) + b"[]]")


def csv_line(path: Path) -> None:
    path.write_bytes(b"text\n" + b"a" * (200 * MIB))


def csv_quote(path: Path) -> None:
    path.write_bytes(b'text\n"' + b"aaaaaaaaa\n" * (20 * MIB))


def csv_header(path: Path) -> None:
    path.write_bytes(b"a," * (100 * MIB))


def text(path: Path) -> None:
    path.write_bytes(b"word " * (40 * MIB))


def archive(path: Path, compress: Callable[[bytes], bytes], size: int, times: int) -> None:
    """A tar with one member of `size` zeros, as so many concatenated compressed streams."""
    header = tarfile.TarInfo("a.txt")
    header.size = size * times
    block = compress(bytes(size))
    with path.open("wb") as file:
        file.write(compress(header.tobuf()))
        for _ in range(times):
            file.write(block)


def tar_gz(path: Path) -> None:
    archive(path, gzip.compress, 256 * MIB, 16)


def tar_bz2(path: Path) -> None:
    archive(path, bz2.compress, 64 * MIB, 64)


def tar_xz(path: Path) -> None:
    archive(path, lzma.compress, 64 * MIB, 64)


def tar_header(path: Path) -> None:
    """A header of the pax format that would be read whole."""
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 4 * 2**30
    block = gzip.compress(bytes(256 * MIB))
    path.write_bytes(gzip.compress(header.tobuf()) + block * 16)


def tar_folders(path: Path) -> None:
    """Entries without content, which compress to nothing."""
    header = tarfile.TarInfo("a")
    header.type = tarfile.DIRTYPE
    path.write_bytes(gzip.compress(header.tobuf() * (256 * MIB // 512)) * 4)


def tar_headers(path: Path) -> None:
    """Headers of headers, which tarfile reads by calling itself."""
    header = tarfile.TarInfo("a")
    header.type, header.size = tarfile.XHDTYPE, 0
    path.write_bytes(header.tobuf() * 100_000)


def tar_sparse(path: Path) -> None:
    """A member with a hole of 8 GiB."""
    header = tarfile.TarInfo("a.txt")
    pax = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.txt"}
    header.pax_headers = {**pax, "GNU.sparse.realsize": str(8 * 2**30)}
    header.size = 512
    content = b"1\n" + str(8 * 2**30 - 1).encode() + b"\n1\n"
    path.write_bytes(header.tobuf(tarfile.PAX_FORMAT) + content.ljust(512, b"\0") + bytes(1024))


def parquet_dictionary(path: Path) -> None:
    """A text of 40 MB that stands once in the file and in each of a thousand rows."""
    import pyarrow as pa
    from pyarrow import parquet

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["a" * 40_000_000])
    parquet.write_table(pa.table({"text": values}), path, compression="zstd")


def parquet_nested(path: Path) -> None:
    """The same in the messages of a chat."""
    import pyarrow as pa
    from pyarrow import parquet

    text = pa.DictionaryArray.from_arrays(pa.array([0] * 40_000, pa.int32()), ["a" * 40_000_000])
    items = pa.StructArray.from_arrays([text], ["content"])
    messages = pa.ListArray.from_arrays(pa.array(range(0, 40_001, 40), pa.int32()), items)
    parquet.write_table(pa.table({"messages": messages}), path, compression="zstd")


def parquet_zeros(path: Path) -> None:
    """A list of fifty million numbers, of which a run of zeros is left."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    values = pa.array(np.zeros(50_000_000, dtype=np.int8))
    column = pa.ListArray.from_arrays(pa.array([0, 50_000_000], pa.int32()), values)
    parquet.write_table(pa.table({"text": column}), path, compression="zstd")


def parquet_text(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(
        pa.table({"text": ["a" * 200_000_000]}), path, compression="zstd", use_dictionary=False
    )


def arrow_zstd(path: Path) -> None:
    """A compressed batch that expands to 600 MB."""
    import pyarrow as pa

    table = pa.table({"text": pa.array(["a" * 30_000_000] * 20, pa.large_string())})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(path, table.schema, options=options) as file:
        file.write_table(table)


def arrow_dictionary(path: Path) -> None:
    """A text of 40 MB that stands once in the file and in each of a million rows."""
    import pyarrow as pa

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int32()), ["a" * 40_000_000])
    table = pa.table({"text": values})
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table)


def arrow_nulls(path: Path) -> None:
    """A hundred million rows without a byte."""
    import pyarrow as pa

    batch = pa.record_batch([pa.nulls(10**8)], names=["text"])
    with pa.ipc.new_file(path, batch.schema) as file:
        file.write_batch(batch)


BOMBS = [
    ("a.jsonl", long_line),
    ("a.json", long_line),
    ("a.jsonl", many_brackets),
    ("a.json", many_brackets),
    ("a.jsonl", deep_line),
    ("a.json", deep_line),
    ("a.json", empty_lists),
    ("a.csv", csv_line),
    ("a.csv", csv_quote),
    ("a.csv", csv_header),
    ("a.txt", text),
    ("a.tar", tar_gz),
    ("a.tar", tar_bz2),
    ("a.tar", tar_xz),
    ("a.tar", tar_header),
    ("a.tar", tar_folders),
    ("a.tar", tar_headers),
    ("a.tar", tar_sparse),
    ("a.parquet", parquet_dictionary),
    ("a.parquet", parquet_nested),
    ("a.parquet", parquet_zeros),
    ("a.parquet", parquet_text),
    ("a.arrow", arrow_zstd),
    ("a.arrow", arrow_dictionary),
    ("a.arrow", arrow_nulls),
]


@pytest.mark.parametrize(("name", "make"), BOMBS)
def test_data_that_would_fill_memory_is_refused(name: str, make: Callable, tmp_path, commands) -> None:
    make(tmp_path / name)
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path / name}")
    assert not ended.wrong and ended.code == 2, ended
