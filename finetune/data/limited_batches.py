"""Read parquet and Arrow files in batches that fit in memory, even if a small file expands to many bytes."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.compute
from pyarrow import ipc, parquet, types

from finetune.data import arrow_sizes, page_sizes, read_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pyarrow.parquet import FileMetaData, RowGroupMetaData

    from finetune.data.read_limits import Limits

compute: Any = pyarrow.compute  # pyarrow creates its functions at run time
ROWS = 1000
BATCH_BYTES = 64 * 2**20
PAGE_BYTES = 512 * 2**20  # limit of the sum over the columns of each column's largest page
EACH = 8  # bytes counted for each value, because an encoding can repeat a value at no cost
LISTS = (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)


def read_parquet(content: pyarrow.MemoryMappedFile, path: Path, limits: Limits) -> Iterator[Any]:
    """Yield the batches of a parquet file, one row group after another.

    Raises:
        UserError: the file expands to more bytes than the limits allow (exit 2).
        ValueError: it has fewer or more rows than its metadata says.
        OSError: its metadata is damaged.
    """
    file = parquet.ParquetFile(content, page_checksum_verification=True)
    _check_columns(file.metadata, content.size())
    most, total, in_pages = limits.expanded(path), 0, 0
    at_once = max(PAGE_BYTES, limits.uncompressed or 0)
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    for group in groups:
        columns = [group.column(index) for index in range(group.num_columns)]
        total += sum(max(one.total_uncompressed_size, EACH * one.num_values) for one in columns)
    if total > most:
        raise read_limits.expands(path, most)
    for index, group in enumerate(groups):
        pages = [page_sizes.of_column(content, group.column(number)) for number in range(group.num_columns)]
        in_pages += sum(map(sum, pages))
        if sum(max(sizes, default=0) for sizes in pages) > at_once:
            raise read_limits.expands(path, at_once)
        if in_pages > most:
            raise read_limits.expands(path, most)
        rows, read = _batch_rows(content, path, group, index, limits), 0
        for batch in file.iter_batches(batch_size=rows, row_groups=[index]):
            read += batch.num_rows
            yield batch
        if read != group.num_rows:
            raise ValueError(f"row group {index} holds {read:,} rows and names {group.num_rows:,}")
    if (rows := sum(group.num_rows for group in groups)) != file.metadata.num_rows:
        raise ValueError(f"the row groups hold {rows:,} rows, and the file names {file.metadata.num_rows:,}")


class _NoPages(io.RawIOBase):
    """A file of some size whose bytes can't be read."""

    def __init__(self, size: int) -> None:
        self.size, self.at = size, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (self.size if whence == os.SEEK_END else 0)
        return self.at

    def read(self, size: int = -1) -> bytes:
        raise _PagesReachedError


class _PagesReachedError(Exception):
    """The metadata is read, and the pages are next."""


def _check_columns(metadata: FileMetaData, size: int) -> None:
    """Let pyarrow read the metadata of all columns where it can raise an error.

    `RowGroupMetaData.column` of pyarrow 26 ends the process if the metadata of a column is damaged.

    Args:
        size: the bytes of the file.
    """
    pages = pyarrow.PythonFile(_NoPages(size), mode="r")
    file = parquet.ParquetFile(pages, metadata=metadata, pre_buffer=True)
    with contextlib.suppress(_PagesReachedError):
        next(file.iter_batches(row_groups=list(range(metadata.num_row_groups))), None)


def read_arrow(content: pyarrow.MemoryMappedFile, path: Path, limits: Limits) -> Iterator[Any]:
    """Yield the batches of an Arrow file or stream.

    Raises:
        UserError: the file expands to more bytes than the limits allow (exit 2).
    """
    most = limits.expanded(path)
    if arrow_sizes.expanded_bytes(content) > most:
        raise read_limits.expands(path, most)
    for batch in _arrow_batches(content):
        batch.validate()
        views = (_view_lengths(array) for array in _leaves(batch, whole=True) if _is_view(array))
        if sum(int(lengths.sum()) for lengths in views) > most:  # full validation reads each view
            raise read_limits.expands(path, most)
        batch.validate(full=True)  # an invalid offset would crash the process
        yield batch


def _arrow_batches(content: pyarrow.NativeFile) -> Iterator[Any]:
    """Yield the stored batches of an Arrow file or stream, in the order in which they are stored.

    The footer of a file can name other bytes, or leave out batches. So finetune reads a file as the stream
    that it contains, and compares the number of batches.

    Raises:
        ValueError: the footer names fewer or more batches than the file contains.
    """
    content.seek(0)
    is_file = content.read(len(arrow_sizes.MAGIC)) == arrow_sizes.MAGIC
    named, read = ipc.open_file(content).num_record_batches if is_file else None, 0
    content.seek(arrow_sizes.FIRST if is_file else 0)
    for batch in ipc.open_stream(content):
        read += 1
        yield batch
    if named not in (None, read):
        raise ValueError(f"the file contains {read:,} batches, and its footer names {named:,}")


def _batch_rows(
    content: pyarrow.MemoryMappedFile, path: Path, group: RowGroupMetaData, index: int, limits: Limits
) -> int:
    """Return the number of rows per batch that fits in memory. Every row can repeat a dictionary value."""
    columns = [group.column(number) for number in range(group.num_columns)]
    if any("DELTA_BYTE_ARRAY" in one.encodings for one in columns):  # values share their prefixes
        return 1
    coded = [
        one.path_in_schema for one in columns if one.physical_type == "BYTE_ARRAY" and one.has_dictionary_page
    ]
    if not coded:
        return ROWS
    file = parquet.ParquetFile(content, read_dictionary=coded, page_checksum_verification=True)
    longest = 0
    for batch in file.iter_batches(batch_size=1, row_groups=[index]):
        longest = _longest_repeated(batch)
        break
    if longest > limits.example:
        raise read_limits.too_long(str(path), limits)
    return _rows_of(longest)


def _rows_of(longest: int) -> int:
    """Return the number of rows per batch if each row can hold a value of `longest` bytes."""
    return max(1, min(ROWS, BATCH_BYTES // max(1, longest)))


def _longest_repeated(batch: object) -> int:
    """Return the bytes of the longest text that rows can share in each column, summed over the columns."""
    return sum(compute.max(lengths).as_py() or 0 for lengths, _ in _repeated_texts(batch))


def _size(batch: pyarrow.RecordBatch) -> int:
    """Return the bytes of a batch in memory, where each row counts its own copy of a shared text."""
    size = batch.nbytes
    for lengths, stored in _repeated_texts(batch):
        size += (compute.sum(lengths).as_py() or 0) - stored
    return size + EACH * sum(len(array) for array in _leaves(batch) if types.is_null(array.type))


def _repeated_texts(batch: object) -> Iterator[tuple[Any, int]]:
    """Yield each array whose rows can share texts, as text lengths per row and stored bytes."""
    for array in _leaves(batch):
        if types.is_dictionary(array.type):
            kind = array.type.value_type
            if types.is_binary(kind) or types.is_string(kind) or types.is_large_string(kind):
                lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
                yield lengths.cast(pyarrow.int64()), array.dictionary.nbytes
        elif _is_view(array):
            yield pyarrow.array(_view_lengths(array)), sum(text.size for text in array.buffers()[2:])


def _is_view(array: pyarrow.Array) -> bool:
    return types.is_string_view(array.type) or types.is_binary_view(array.type)


def _view_lengths(array: pyarrow.Array) -> Any:
    """Return the bytes of each text. A view has 16 bytes and starts with the length of its text."""
    lengths = numpy.frombuffer(array.buffers()[1], numpy.int32)[0::4]
    return lengths[array.offset : array.offset + len(array)].astype(numpy.int64)


def _leaves(batch: pyarrow.RecordBatch, whole: bool = False) -> Iterator[Any]:
    """Yield the arrays of a batch that hold no other arrays.

    Args:
        whole: include the values outside the rows of the batch. This mode trusts no offset.
    """
    arrays = list(batch.columns)
    while arrays:
        array = arrays.pop()
        if isinstance(array, pyarrow.ExtensionArray):
            arrays.append(array.storage)
        elif isinstance(array, pyarrow.MapArray):
            arrays += [array.keys, array.items]
        elif isinstance(array, pyarrow.StructArray):
            arrays += (
                [array.field(index) for index in range(array.type.num_fields)] if whole else array.flatten()
            )
        elif isinstance(array, LISTS):
            arrays.append(array.values if whole else array.flatten())
        else:
            yield array


def limited(batches: Iterable[Any], path: Path, limits: Limits) -> Iterator[Any]:
    """Yield the same rows in batches that fit in memory as Python values.

    Raises:
        UserError: a row is too long, or the total exceeds the limits (exit 2).
    """
    start, total, most = 0, 0, limits.expanded(path)
    for batch in batches:
        repeated = _longest_repeated(batch)
        if repeated > limits.example:
            raise read_limits.too_long(f"{path}[{start}]", limits)
        for part, size in _parts(batch, _rows_of(repeated)):
            if size > limits.example:
                for row in range(part.num_rows):
                    if _size(part.slice(row, 1)) > limits.example:
                        raise read_limits.too_long(f"{path}[{start + row}]", limits)
            total, start = total + size, start + part.num_rows
            if total > most:
                raise read_limits.expands(path, most)
            yield part


def _parts(batch: pyarrow.RecordBatch, rows: int) -> Iterator[tuple[Any, int]]:
    """Split a batch into parts of at most `rows` rows, each with its size.

    Parts of large rows have fewer rows.
    """
    for first in range(0, batch.num_rows, rows):
        part = batch.slice(first, rows)
        size = _size(part)
        if size > BATCH_BYTES and part.num_rows > 1:
            yield from _parts(part, (part.num_rows + 1) // 2)
        else:
            yield part, size
