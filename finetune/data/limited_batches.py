"""Batches of parquet and Arrow files that fit in memory, whatever their encodings make of few bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute
from pyarrow import parquet, types

from finetune.data import read_limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from finetune.data.read_limits import Limits

compute: Any = pyarrow.compute  # its functions are made at run time
ROWS = 1000
BATCH_BYTES = 64 * 2**20
EACH = 8  # bytes of a value that an encoding repeats at no cost


def read_parquet(content: Any, path: Path, limits: Limits) -> Iterator[Any]:
    """The batches of a parquet file, a group of rows after another.

    Raises:
        UserError: it expands to more than the limits allow (exit 2).
    """
    file = parquet.ParquetFile(content)
    most, total = limits.expanded(path), 0
    groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
    for group in groups:
        columns = [group.column(index) for index in range(group.num_columns)]
        total += sum(max(one.total_uncompressed_size, EACH * one.num_values) for one in columns)
    if total > most:
        raise read_limits.expands(path, most)
    for index, group in enumerate(groups):
        rows = _batch_rows(content, path, group, index, limits)
        yield from file.iter_batches(batch_size=rows, row_groups=[index])


def _batch_rows(content: Any, path: Path, group: Any, index: int, limits: Limits) -> int:
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
    """Bytes of the longest values of a batch's dictionaries, together."""
    longest = 0
    for array in _coded_texts(batch):
        longest += compute.max(compute.binary_length(array.dictionary)).as_py() or 0
    return longest


def _size(batch: Any) -> int:
    """Bytes of a batch in memory once the values of dictionaries stand in each row."""
    size = batch.nbytes
    for array in _coded_texts(batch):
        lengths = compute.binary_length(array.dictionary)
        each = compute.take(lengths, array.indices).cast(pyarrow.int64())
        size += (compute.sum(each).as_py() or 0) - array.dictionary.nbytes
    return size


def _coded_texts(batch: Any) -> Iterator[Any]:
    """The arrays of a batch whose texts stand in a dictionary."""
    for array in (found for column in batch.columns for found in _dictionaries(column)):
        kind = array.dictionary.type
        if types.is_binary(kind) or types.is_string(kind) or types.is_large_string(kind):
            yield array


def _dictionaries(array: Any) -> Iterator[Any]:
    """The dictionary arrays in an array, nested ones too."""
    if isinstance(array, pyarrow.DictionaryArray):
        yield array
    elif isinstance(array, pyarrow.StructArray):
        for part in array.flatten():
            yield from _dictionaries(part)
    elif isinstance(array, pyarrow.MapArray):
        yield from _dictionaries(array.keys)
        yield from _dictionaries(array.items)
    elif isinstance(array, (pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray)):
        yield from _dictionaries(array.flatten())


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
        for part in _parts(batch, _rows_of(repeated)):
            size = _size(part)
            if size > limits.example:
                for row in range(part.num_rows):
                    if _size(part.slice(row, 1)) > limits.example:
                        raise read_limits.too_long(f"{path}[{start + row}]", limits)
            total, start = total + size, start + part.num_rows
            if total > most:
                raise read_limits.expands(path, most)
            yield part


def _parts(batch: Any, rows: int) -> Iterator[Any]:
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)
