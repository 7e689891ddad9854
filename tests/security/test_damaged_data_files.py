"""A changed byte of a parquet or Arrow file: all rows are read, or the file is refused with a message."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow
import pytest
from pyarrow import ipc, parquet

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
