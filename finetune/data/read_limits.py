"""Limits that protect the memory: the bytes of an example, and the bytes that a file can expand to."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import IO

    from finetune.recipe.schema import Source

# A tokenizer takes about 450 bytes of memory for each token, and a token can be one byte
EXAMPLE_BYTES = 4 * 2**20
# A file may expand to the larger of EXPANSION times its size and LEAST bytes
EXPANSION, LEAST = 100, 2**28
# In bytes. An xz dictionary can have up to 4 GiB, but `xz -9` needs only 65 MiB.
XZ_MEMORY = 2**28
_BLOCK = 2**20
# Of a pax header. Older releases of Python search it in a time that grows with the square of a number in it
LONGEST_PAX, LONG_NUMBER = 2**16, re.compile(rb"\d{101}")


class Limits(NamedTuple):
    """The limits for reading one file, in bytes."""

    example: int = EXAMPLE_BYTES
    """`data.max_example_bytes`."""
    uncompressed: int | None = None
    """`data.max_uncompressed_bytes`."""

    def expanded(self, path: Path) -> int:
        """Return the number of bytes that a compressed file may expand to."""
        own = self.uncompressed
        return max(LEAST, EXPANSION * path.stat().st_size) if own is None else own


DEFAULT = Limits()


def of_source(source: Source) -> Limits:
    return Limits(source.max_example_bytes or EXAMPLE_BYTES, source.max_uncompressed_bytes)


def limited_lines(file: IO[Any], path: Path, limits: Limits) -> Iterator[Any]:
    """Yield the lines of an open file, in text or binary mode.

    Raises:
        UserError: a line is too long (exit 2).
    """
    for number, line in enumerate(iter(partial(file.readline, limits.example + 1), file.read(0)), start=1):
        if len(line) > limits.example:
            raise too_long(f"{path}:{number}", limits)
        yield line


class RecordLines:
    """The lines of a CSV file. A record with quotes can take several lines."""

    def __init__(self, file: IO[str], path: Path, limits: Limits) -> None:
        self.lines, self.path, self.limits = limited_lines(file, path, limits), path, limits
        self.number = self.characters = 0

    def begin_record(self) -> None:
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.number += 1
        self.characters += len(line)
        if self.characters > self.limits.example:
            raise too_long(f"{self.path}:{self.number}", self.limits)
        return line


def check_size(path: Path, limits: Limits) -> None:
    """Raise a UserError if a file that holds one example is too large (exit 2)."""
    if path.stat().st_size > limits.example:
        raise too_long(str(path), limits)


def too_long(where: str, limits: Limits) -> UserError:
    """Return the error for an example with too many bytes."""
    return UserError(
        Problem(
            "an example is too large to read into memory",
            where=where,
            expected=f"at most {limits.example:,} bytes",
            fix=f"data.max_example_bytes: {2 * limits.example}",
            why="a damaged or harmful file can have an example of any size",
            code="data-size",
        )
    )


def expands(path: Path, limit: int) -> UserError:
    """Return the error for a file that expands to too many bytes."""
    return UserError(
        Problem(
            "the uncompressed file is too large",
            where=str(path),
            expected=f"at most {limit:,} bytes",
            fix=f"data.max_uncompressed_bytes: {10 * limit}",
            why="a small harmful file can expand without end",
            code="data-size",
        )
    )


class Decompressed:
    """The decompressed content of a bzip2, .xz or .lzma file.

    `lzma.LZMAFile` has no memory limit. `bz2.BZ2File` ends without an error at a damaged header of a stream.
    """

    def __init__(self, file: BinaryIO, make: Callable[[], Any]) -> None:
        self.file, self.make, self.decoder = file, make, make()

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            if self.decoder.eof:  # several compressed streams can be concatenated
                more = (self.decoder.unused_data or self.file.read(_BLOCK)).lstrip(b"\0")
                if not more:
                    break
                self.decoder = self.make()
            else:
                more = self.file.read(_BLOCK) if self.decoder.needs_input else b""
                if self.decoder.needs_input and not more:
                    raise EOFError("the compressed file is cut off")
            found += self.decoder.decompress(more, size - len(found))
        return bytes(found)


def _of_bzip2(file: BinaryIO) -> Decompressed:
    return Decompressed(file, bz2.BZ2Decompressor)


def _of_xz(file: BinaryIO) -> Decompressed:
    return Decompressed(file, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY))


_DECOMPRESS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", _of_bzip2),
    (b"\xfd7zXZ\0", _of_xz),
    (b"\x5d\0\0\x80", _of_xz),
)


def is_compressed(start: bytes) -> bool:
    """Return whether a file that starts with these 6 bytes has a compression that `ArchiveStream` reads."""
    return any(start.startswith(magic) for magic, _ in _DECOMPRESS)


class ArchiveStream(io.RawIOBase):
    """The decompressed content of an archive, read from start to end within limits."""

    def __init__(self, file: BinaryIO, path: Path, limits: Limits) -> None:
        start = file.read(6)
        file.seek(0)
        opened = next((make for magic, make in _DECOMPRESS if start.startswith(magic)), None)
        self.content = opened(file) if opened else file
        self.path, self.limits, self.position = path, limits, 0
        self.last = b""  # what `read` returned last
        self.next_is_pax = False  # whether the next bytes are a pax header of a tar file
        self.most = limits.expanded(path) if opened else path.stat().st_size
        super().__init__()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move forward to a position. Moving back is not supported."""
        if whence != io.SEEK_SET or position < self.position:
            raise io.UnsupportedOperation("an archive is read from its beginning to its end")
        while self.position < position and self.read(min(_BLOCK, position - self.position)):
            pass
        return self.position

    def rest(self) -> bytes:
        """Read to the end, which compares the checksum of a compressed file. Return the first bytes but 0."""
        found = b""
        while block := self.read(min(_BLOCK, self.limits.example)):
            found = found or block.strip(b"\0")
        return found

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.limits.example:
            raise too_long(str(self.path), self.limits)
        self.last = found = self.content.read(size)
        self.position += len(found)
        if self.position > self.most:
            raise expands(self.path, self.most)
        if self.next_is_pax and (len(found) > LONGEST_PAX or LONG_NUMBER.search(found)):
            raise ValueError("a pax header is too long, or has a long number")
        self.next_is_pax = False
        return found
