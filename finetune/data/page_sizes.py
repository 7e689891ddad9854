"""Compute the uncompressed size of the pages of a parquet file from their headers.

The format: https://parquet.apache.org/docs/file-format/data-pages/
The headers use Thrift's compact protocol. pyarrow exposes only the sizes in the footer, which can be wrong.
It allocates memory by the sizes in the page headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow
    from pyarrow.parquet import ColumnChunkMetaData

MOST_PAGES = 200_000  # of a column in a row group
UNCOMPRESSED, COMPRESSED, PAGE, PAGE_V2 = 2, 3, 5, 8  # fields of a page header
VALUES = 1  # field of `PAGE` and `PAGE_V2`
TRUE, FALSE, BYTE, DOUBLE, BINARY, STRUCT = 1, 2, 3, 7, 8, 12  # types of fields
INTEGERS = (4, 5, 6)


def of_column(content: pyarrow.MemoryMappedFile, column: object) -> list[int]:
    """Return the uncompressed bytes of each page of a column in a row group.

    Raises:
        ValueError: a header is damaged.
    """
    try:
        return list(_sizes(content, column))
    except (LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError("the header of a page is damaged") from None


def _sizes(content: pyarrow.NativeFile, column: ColumnChunkMetaData) -> Iterator[int]:
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    content.seek(start)
    buffer = memoryview(content.read_buffer(column.total_compressed_size)).cast("B")
    at = count = values = 0
    while at < len(buffer) and values < column.num_values:
        header, at = _struct(buffer, at)
        count += 1
        expanded, stored = header[UNCOMPRESSED], header[COMPRESSED]
        if count > MOST_PAGES or expanded < 0 or stored < 0:
            raise ValueError("a column has too many pages, or pages of a negative size")
        yield expanded
        at += stored
        values += (header.get(PAGE) or header.get(PAGE_V2) or {}).get(VALUES, 0)


def _struct(buffer: memoryview, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a structure by their numbers, and the position after it."""
    fields: dict[int, Any] = {}
    number = 0
    while kind := buffer[at] & 15:
        step, at = buffer[at] >> 4, at + 1
        if step:
            number += step
        else:
            number, at = _integer(buffer, at)
        fields[number], at = _value(buffer, at, kind)
    return fields, at + 1


def _value(buffer: memoryview, at: int, kind: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE):
        return kind == TRUE, at
    if kind in INTEGERS:
        return _integer(buffer, at)
    if kind == STRUCT:
        return _struct(buffer, at)
    if kind == BINARY:
        size, at = _unsigned(buffer, at)
        return None, at + size
    if kind in (BYTE, DOUBLE):
        return None, at + (1 if kind == BYTE else 8)
    raise ValueError("the header of a page holds a list")


def _integer(buffer: memoryview, at: int) -> tuple[int, int]:
    value, at = _unsigned(buffer, at)
    return value >> 1 ^ -(value & 1), at


def _unsigned(buffer: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = buffer[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("the header of a page has a number of more than 64 bits")
