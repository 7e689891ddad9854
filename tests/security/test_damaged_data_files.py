"""A changed byte of a parquet, Arrow or tar file: all rows are read, or the file is refused."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from finetune.core.errors import UserError
from finetune.data import readers
from finetune.data.examples import BadRow
from support.paths import ROOT
from support.soak import soak_except

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 20
READ = """
import json, sys
from pathlib import Path
from finetune.core.errors import UserError
from finetune.data import readers
path, first, bits = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
content, wrong = path.read_bytes(), []
for place in (*range(4, 60), *range(first, len(content))):  # a header of a page, and the metadata
    for bit in bits:
        changed = bytearray(content)
        changed[place] ^= bit
        path.write_bytes(changed)
        print(place, bit, end=" ", flush=True)
        try:
            count = len(list(readers.read_file(path)))
            result = "" if count == int(sys.argv[4]) == readers.count_rows(path) else f"{count} rows"
        except UserError:
            result = ""
        except Exception as error:  # what is looked for
            result = repr(error)
        print(result, flush=True)
"""


def write(path: Path) -> int:
    """Write a small table, and return the position of its metadata."""
    rows = [{"texts": [f"q{number % 3}"]} for number in range(ROWS)]
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".arrow":
        with path.open("wb") as file, ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=12)
        return 0
    parquet.write_table(table, path, row_group_size=12, store_schema=False)
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


CASES = [("parquet", [2, 128]), ("parquet", [1, 2, 4, 8, 16, 32, 64, 128]), ("arrow", [1, 4, 128])]


@pytest.mark.parametrize(("suffix", "bits"), soak_except(CASES[:1], CASES))
def test_file_with_a_changed_byte_is_read_whole_or_refused(suffix: str, bits: list[int], tmp_path) -> None:
    path = tmp_path / f"rows.{suffix}"
    first = write(path)
    words = [sys.executable, "-c", READ, str(path), str(first), json.dumps(bits), str(ROWS)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = ended.stdout.splitlines()
    assert ended.returncode == 0, (lines[-1:], ended.stderr[-500:])
    assert lines and not [line for line in lines if len(line.split()) > 2]


def stream() -> tuple[bytes, list[int]]:
    """An Arrow stream of four batches of ten rows, and where each batch ends."""
    sink, ends = pyarrow.BufferOutputStream(), list[int]()
    table = pyarrow.table({"prompt": [f"q{n}" for n in range(40)], "completion": ["a"] * 40})
    with ipc.new_stream(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
            ends.append(sink.tell())
    return sink.getvalue().to_pybytes(), ends


END = b"\xff\xff\xff\xff\0\0\0\0"


@pytest.mark.parametrize(
    "case", ["cut", "no end mark", "early end mark", "two streams", "more after the end"]
)
def test_arrow_stream_that_ends_early_or_late_is_refused(case: str, tmp_path) -> None:
    content, ends = stream()
    path = tmp_path / "rows.arrow"
    path.write_bytes(content)
    assert len(list(readers.read_file(path))) == 40
    path.write_bytes(content.removesuffix(END) + b"\0\0\0\0")  # the end mark of old writers
    assert len(list(readers.read_file(path))) == 40
    cut = content[: ends[1]]
    changed = {
        "cut": cut,
        "no end mark": content.removesuffix(END),
        "early end mark": cut + END + content[ends[1] :],
        "two streams": content + content,
        "more after the end": content + b"more",
    }[case]
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(UserError) as raised:
        list(readers.read_file(path))
    assert "end mark" in str(raised.value)


def test_parquet_page_that_does_not_fit_its_checksum_is_refused(tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"prompt": ["q"] * 40, "completion": [f"spam {n}" for n in range(40)]})
    for use_dictionary in (True, False):
        parquet.write_table(
            table, path, write_page_checksum=True, compression="none", use_dictionary=use_dictionary
        )
        assert len(list(readers.read_file(path))) == 40
        path.write_bytes(path.read_bytes().replace(b"spam 3", b"sqam 3", 1))
        with pytest.raises(UserError) as raised:
            list(readers.read_file(path))
        assert "checksum" in str(raised.value).lower()


def test_arrow_file_whose_footer_names_other_batches_is_refused(tmp_path) -> None:
    """An end mark in place of the first message hides all batches from a walk over the messages."""
    path, (content, _) = tmp_path / "rows.arrow", stream()
    messages = pyarrow.BufferReader(content)
    ipc.MessageReader.open_stream(messages).read_next_message()
    table = ipc.open_stream(content).read_all()
    with path.open("wb") as file, ipc.new_file(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=10):
            writer.write_batch(batch)
    assert len(list(readers.read_file(path))) == 40
    written = path.read_bytes()
    first = 8 + messages.tell()  # the first batch, after the schema
    path.write_bytes(written[:first] + END + written[first + len(END) :])
    with pytest.raises(UserError, match="contains 0 batches, and its footer names 4"):
        list(readers.read_file(path))


def packed(count: int = 12) -> bytes:
    """A tar file of rows."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number in range(count):
            content = json.dumps(
                {"prompt": f"Who is number {number}?", "completion": f"It is {number}."}
            ).encode()
            member = tarfile.TarInfo(f"{number:04}.json")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def rows_of(content: bytes, folder: Path) -> list[object] | None:
    """The rows of an archive, or `None` if it is refused or has unreadable rows."""
    path = folder / "rows.tar"
    path.write_bytes(content)
    try:
        rows = list(readers.read_file(path))
    except UserError:
        return None
    return None if any(isinstance(row, BadRow) for row in rows) else [row.value for row in rows]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_flipped_bit_of_an_archive_loses_and_changes_no_row(pack: Any, tmp_path) -> None:
    """A plain archive has checksums of its headers, a compressed one also of its content."""
    whole, plain = rows_of(packed(), tmp_path), packed()
    content, random = pack(plain), Random(3)
    headers = [start for start in range(0, len(plain), 512) if plain[start + 257 :].startswith(b"ustar")]
    refused = 0
    for _ in range(60):
        damaged = bytearray(content)
        is_plain = content == plain
        place = random.choice(headers) + random.randrange(345) if is_plain else random.randrange(len(content))
        damaged[place] ^= 1 << random.randrange(8)
        found = rows_of(bytes(damaged), tmp_path)
        assert found in (None, whole), place
        refused += found is None
    assert refused > 30


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_archive_that_is_cut_or_joined_is_refused(pack: Any, tmp_path) -> None:
    content = packed()
    end = len(content.rstrip(b"\0")) // 512 * 512 + 512  # after the last member
    whole = rows_of(pack(content), tmp_path)
    assert whole and rows_of(pack(content[: end + 512]), tmp_path) == whole
    for wrong in (content[:end], content + packed(3), content[:end] + b"more" * 200, content[: end - 512]):
        assert rows_of(pack(wrong), tmp_path) is None
