"""Compute the decompressed size of an Arrow file from the headers of its messages.

The format:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
pyarrow shows the size of a compressed buffer only after it has decompressed the buffer.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow

DICTIONARY, BATCH = 2, 3  # message types
NODES, BUFFERS = 1, 2  # fields of a record batch
MAGIC, FIRST = b"ARROW1", 8  # the first bytes of a file, and where its first message begins
EACH = 8  # bytes counted for each value, because a null takes no bytes in the buffers


def expanded_bytes(content: pyarrow.NativeFile) -> int:
    """Return the bytes that all batches of an Arrow file or stream take in memory.

    Each value counts `EACH` bytes in addition to its buffers.

    Raises:
        ValueError: a message is damaged, or a stream does not end with its end mark.
    """
    import pyarrow
    from pyarrow import ipc

    content.seek(0)
    is_stream = content.read(len(MAGIC)) != MAGIC
    content.seek(0 if is_stream else FIRST)
    reader, total = ipc.MessageReader.open_stream(content), 0
    while True:
        start = content.tell()
        try:
            message = reader.read_next_message()
        except (StopIteration, EOFError):
            if is_stream and (content.tell() == start or content.tell() != content.size()):
                raise ValueError("the stream does not end with its end mark") from None
            break
        except pyarrow.ArrowException as error:
            raise ValueError(str(error)) from error
        if message.body is not None:
            try:
                total += _of_message(memoryview(message.metadata), memoryview(message.body))
            except (struct.error, IndexError) as error:
                raise ValueError("a message is damaged") from error
    content.seek(0)
    return total


def _of_message(header: memoryview, body: memoryview) -> int:
    table = _follow(header, 0)
    kind, at = _field(header, table, 1), _field(header, table, 2)
    if not kind or not at or header[kind] not in (DICTIONARY, BATCH):
        return 0
    batch = _follow(header, at)
    if header[kind] == DICTIONARY:
        inner = _field(header, batch, 1)
        if not inner:
            return 0
        batch = _follow(header, inner)
    total = EACH * sum(max(0, length) for length, _ in _pairs(header, batch, NODES))
    is_compressed = bool(_field(header, batch, 3))
    for start, length in _pairs(header, batch, BUFFERS):
        expanded = struct.unpack_from("<q", body, start)[0] if is_compressed and length >= 8 else -1
        total += length if expanded == -1 else expanded
        if expanded < -1 or length < 0:
            raise ValueError("a buffer has a negative length")
    return total


def _pairs(header: memoryview, batch: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield (length, null count) of each array of a batch, or (start, length) of each buffer."""
    if at := _field(header, batch, number):
        vector = _follow(header, at)
        (count,) = struct.unpack_from("<I", header, vector)
        for index in range(min(count, len(header) // 16)):
            yield struct.unpack_from("<qq", header, vector + 4 + 16 * index)


def _follow(buffer: memoryview, at: int) -> int:
    """Return the position that a relative offset of a flatbuffer points to."""
    return at + struct.unpack_from("<I", buffer, at)[0]


def _field(buffer: memoryview, table: int, number: int) -> int:
    """Return the position of a field in a flatbuffer table, or 0 if the field has its default value."""
    names = table - struct.unpack_from("<i", buffer, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", buffer, names)[0]:
        return 0
    offset = struct.unpack_from("<H", buffer, names + 4 + 2 * number)[0]
    return table + offset if offset else 0
