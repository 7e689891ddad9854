"""Batches of parquet and Arrow files that fit in memory, whatever their encodings make of few bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.compute
from pyarrow import ipc, parquet, types

from finetune.data import arrow_sizes, page_sizes, read_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from finetune.data.read_limits import Limits

compute: Any = pyarrow.compute  # its functions are made at run time
ROWS = 1000
BATCH_BYTES = 64 * 2**20
PAGE_BYTES = 512 * 2**20  # of the largest page of each column, together
EACH = 8  # bytes of a value that an encoding repeats at no cost
LISTS = (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)


def read_parquet(content: pyarrow.MemoryMappedFile, path: Path, limits: Limits) -> Iterator[Any]:
    """The batches of a parquet file, a group of rows after another.

    Raises:
        UserError: it expands to more than the limits allow (exit 2).
    """
    file = parquet.ParquetFile(content)
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
        rows = _batch_rows(content, path, group, index, limits)
        yield from file.iter_batches(batch_size=rows, row_groups=[index])


def read_arrow(content: pyarrow.MemoryMappedFile, path: Path, limits: Limits) -> Iterator[Any]:
    """The batches of an Arrow file or stream.

    Raises:
        UserError: it expands to more than the limits allow (exit 2).
    """
    most = limits.expanded(path)
    if arrow_sizes.expanded_bytes(content) > most:
        raise read_limits.expands(path, most)
    for batch in _arrow_batches(content):
        batch.validate()
        views = (_view_lengths(array) for array in _leaves(batch, whole=True) if _is_view(array))
        if sum(int(lengths.sum()) for lengths in views) > most:  # each would be looked through
            raise read_limits.expands(path, most)
        batch.validate(full=True)  # else a wrong offset ends the process
        yield batch


def _arrow_batches(content: Any) -> Iterator[Any]:
    """The batches as they are stored, in a file or in a stream."""
    try:
        reader = ipc.open_file(content)
    except ValueError:  # the streaming format has no footer
        content.seek(0)
        yield from ipc.open_stream(content)
        return
    yield from map(reader.get_batch, range(reader.num_record_batches))


def _batch_rows(content: pyarrow.MemoryMappedFile, path: Path, group: Any, index: int, limits: Limits) -> int:
    """Rows of a batch that memory has room for: a value of a dictionary may stand in each of them."""
    columns = [group.column(number) for number in range(group.num_columns)]
    if any("DELTA_BYTE_ARRAY" in one.encodings for one in columns):  # values share their beginnings
        return 1
    coded = [
        one.path_in_schema for one in columns if one.physical_type == "BYTE_ARRAY" and one.has_dictionary_page
    ]
    if not coded:
        return ROWS
    file = parquet.ParquetFile(content, read_dictionary=coded)
    longest = 0
    for batch in file.iter_batches(batch_size=1, row_groups=[index]):
        longest = _longest_repeated(batch)
        break
    if longest > limits.example:
        raise read_limits.too_long(str(path), limits)
    return _rows_of(longest)


def _rows_of(longest: int) -> int:
    """Rows of a batch, of which each may have a value with so many bytes."""
    return max(1, min(ROWS, BATCH_BYTES // max(1, longest)))


def _longest_repeated(batch: Any) -> int:
    """Bytes of the longest texts that may stand in many rows, together."""
    return sum(compute.max(lengths).as_py() or 0 for lengths, _ in _repeated_texts(batch))


def _size(batch: Any) -> int:
    """Bytes of a batch in memory once each text stands in each row that has it."""
    size = batch.nbytes
    for lengths, stored in _repeated_texts(batch):
        size += (compute.sum(lengths).as_py() or 0) - stored
    return size + EACH * sum(len(array) for array in _leaves(batch) if types.is_null(array.type))


def _repeated_texts(batch: Any) -> Iterator[tuple[Any, int]]:
    """Of each array with texts that rows may share: their lengths by row, and the bytes that are stored."""
    for array in _leaves(batch):
        if types.is_dictionary(array.type):
            kind = array.type.value_type
            if types.is_binary(kind) or types.is_string(kind) or types.is_large_string(kind):
                lengths = compute.take(compute.binary_length(array.dictionary), array.indices)
                yield lengths.cast(pyarrow.int64()), array.dictionary.nbytes
        elif _is_view(array):
            yield pyarrow.array(_view_lengths(array)), sum(text.size for text in array.buffers()[2:])


def _is_view(array: Any) -> bool:
    return types.is_string_view(array.type) or types.is_binary_view(array.type)


def _view_lengths(array: Any) -> Any:
    """Bytes of each text. A view has 16 bytes and begins with its text's length."""
    lengths = numpy.frombuffer(array.buffers()[1], numpy.int32)[0::4]
    return lengths[array.offset : array.offset + len(array)].astype(numpy.int64)


def _leaves(batch: Any, whole: bool = False) -> Iterator[Any]:
    """The arrays of a batch that hold no other arrays.

    Args:
        whole: also what stands outside of the batch's rows. It trusts no offset.
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
    """The same rows in batches that memory has room for as Python's values.

    Raises:
        UserError: a row is too long, or all are more than the limits allow (exit 2).
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


def _parts(batch: Any, rows: int) -> Iterator[tuple[Any, int]]:
    """A batch in parts of at most so many rows, each with its size; of large rows a part has fewer."""
    for first in range(0, batch.num_rows, rows):
        part = batch.slice(first, rows)
        size = _size(part)
        if size > BATCH_BYTES and part.num_rows > 1:
            yield from _parts(part, (part.num_rows + 1) // 2)
        else:
            yield part, size
