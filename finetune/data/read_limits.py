"""Limits of what memory holds at once: the bytes of an example, and those that a file expands to."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from finetune.recipe.schema import Source

EXAMPLE_BYTES = 32 * 2**20
EXPANSION, LEAST = 100, 2**28  # times a file's size, and bytes that each may expand to
XZ_MEMORY = 2**28  # bytes of a decoder of xz, whose dictionary may have 4 GiB; `xz -9` needs 65 MiB
_BLOCK = 2**20


class Limits(NamedTuple):
    """Of one file."""

    example: int = EXAMPLE_BYTES
    """`data.max_example_bytes`."""
    uncompressed: int | None = None
    """`data.max_uncompressed_bytes`."""

    def expanded(self, path: Path) -> int:
        """The bytes that a compressed file may expand to."""
        own = self.uncompressed
        return max(LEAST, EXPANSION * path.stat().st_size) if own is None else own


DEFAULT = Limits()


def of_source(source: Source) -> Limits:
    return Limits(source.max_example_bytes or EXAMPLE_BYTES, source.max_uncompressed_bytes)


def limited_lines(file: Any, path: Path, limits: Limits) -> Iterator[Any]:
    """The lines of a file that is open, text or bytes.

    Raises:
        UserError: a line is too long (exit 2).
    """
    for number, line in enumerate(iter(partial(file.readline, limits.example + 1), file.read(0)), start=1):
        if len(line) > limits.example:
            raise too_long(f"{path}:{number}", limits)
        yield line


class RecordLines:
    """The lines of a csv file, of which a record with quotes may take many."""

    def __init__(self, file: Any, path: Path, limits: Limits) -> None:
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
    """Refuse a file that is one example, and too large (exit 2)."""
    if path.stat().st_size > limits.example:
        raise too_long(str(path), limits)


def too_long(where: str, limits: Limits) -> UserError:
    """The error of an example with too many bytes."""
    expected = f"at most {limits.example:,} bytes"
    fix = f"data.max_example_bytes: {2 * limits.example}, if the file is meant to be so"
    return UserError(Problem("an example is too long to be read", where=where, expected=expected, fix=fix))


def expands(path: Path, limit: int) -> UserError:
    """The error of a compressed file with too much in it."""
    what, expected = "the file expands to too many bytes", f"at most {limit:,} bytes"
    fix = f"data.max_uncompressed_bytes: {10 * limit}, if the file is meant to be so"
    return UserError(Problem(what, where=str(path), expected=expected, fix=fix))


class XzFile:
    """The uncompressed content of an .xz or .lzma file; the limit of memory is what `lzma.LZMAFile` lacks."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.decoder = file, lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            if self.decoder.eof:  # files that were compressed on their own may follow each other
                more = (self.decoder.unused_data or self.file.read(_BLOCK)).lstrip(b"\0")
                if not more:
                    break
                self.decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            else:
                more = self.file.read(_BLOCK) if self.decoder.needs_input else b""
                if self.decoder.needs_input and not more:
                    raise EOFError("the compressed file is cut off")
            found += self.decoder.decompress(more, size - len(found))
        return bytes(found)


_DECOMPRESS: tuple[tuple[bytes, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ\0", XzFile),
    (b"\x5d\0\0\x80", XzFile),
)


class ArchiveStream(io.RawIOBase):
    """The uncompressed content of an archive, read from its beginning to its end within limits."""

    def __init__(self, file: BinaryIO, path: Path, limits: Limits) -> None:
        start = file.read(6)
        file.seek(0)
        opened = next((make for magic, make in _DECOMPRESS if start.startswith(magic)), None)
        self.content = opened(file) if opened else file
        self.path, self.limits, self.position = path, limits, 0
        self.most = limits.expanded(path) if opened else path.stat().st_size
        super().__init__()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Go on to a position; there is no way back."""
        if whence != io.SEEK_SET or position < self.position:
            raise io.UnsupportedOperation("an archive is read from its beginning to its end")
        while self.position < position and self.read(min(_BLOCK, position - self.position)):
            pass
        return self.position

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.limits.example:
            raise too_long(str(self.path), self.limits)
        found = self.content.read(size)
        self.position += len(found)
        if self.position > self.most:
            raise expands(self.path, self.most)
        return found
