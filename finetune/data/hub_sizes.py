"""Refuse small files of a Hub dataset that expand to many bytes, before `datasets` reads them.

`datasets` has no limit: it fills the memory with one long row, and the cache with repeated values.
"""

from __future__ import annotations

import re
from pathlib import Path

from finetune.core.errors import Problem, UserError
from finetune.data import read_limits
from finetune.data.read_limits import ArchiveStream, Limits

# First bytes of archives and compressed files that `datasets` would unpack: zip, zstd, lz4, 7z and rar
ARCHIVES = (
    b"PK\x03\x04",
    b"PK\x05\x06",
    b"PK\x07\x08",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"7z\xbc\xaf\x27\x1c",
    b"Rar!",
)
# Names by which pandas unpacks a file, whatever its first bytes are
NAMED = re.compile(r"\.(zip|tgz|tbz2?|txz|zst|7z|rar|lz4|tar(\.[a-z0-9]+)?)$", re.IGNORECASE)
# In bytes. Reading a larger file twice would take too long.
LARGEST = 64 * 2**20


def check(path: Path, limits: Limits) -> None:
    """Read a compressed file or a small parquet or Arrow file once, within limits.

    Raises:
        UserError: the file expands to more bytes than the limits allow, or is an archive (exit 2).
    """
    with path.open("rb") as file:
        start = file.read(512)
        if start.startswith(ARCHIVES) or start[257:262] == b"ustar" or NAMED.search(path.name):
            raise UserError(
                Problem(
                    "finetune does not read this kind of archive from the Hub",
                    "data.name",
                    found=f"{path.name}: a zip, tar, zstd, lz4, 7z or rar file",
                    expected="plain files, gzip, bzip2 or xz",
                    fix="data.revision: refs/convert/parquet, or download and unpack the file",
                    why="finetune can't limit how much it expands",
                    code="data-size",
                )
            )
        if read_limits.is_compressed(start):
            file.seek(0)
            ArchiveStream(file, path, limits).rest()
    if path.suffix not in (".parquet", ".arrow") or path.stat().st_size > LARGEST:
        return
    import pyarrow

    from finetune.data import limited_batches

    is_parquet = path.suffix == ".parquet"
    read = limited_batches.read_parquet if is_parquet else limited_batches.read_arrow
    with pyarrow.memory_map(str(path)) as content:
        for _ in limited_batches.limited(read(content, path, limits), path, limits):
            pass
