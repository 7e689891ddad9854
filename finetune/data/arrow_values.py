"""Convert the rows of Arrow tables as `datasets` does. Extension types are decoded or raise an error."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.data.examples import BadRow, Row
from finetune.data.json_values import DECODER, MOST_VALUES, checked_row, too_many_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import pyarrow

    Decoder = Callable[[Any], Any]

# Key in a field's metadata that names an extension type unknown to pyarrow
EXTENSION = b"ARROW:extension:name"
ARRAYS = "datasets.features.features.Array"  # Array2D to Array5D, which are stored as lists of numbers


def table_rows(batches: Iterable[Any], name: str) -> Iterator[Row | BadRow]:
    """Yield every row of tables or record batches.

    Args:
        name: prefix of the position that errors show.

    Raises:
        UserError: a column has a type that is not supported, or two columns have the same name (exit 2).
    """
    start = 0
    for batch in batches:
        counts = Counter(batch.schema.names)
        if twice := [column for column, count in counts.items() if count > 1]:
            raise UserError(
                Problem(
                    "two columns have the same name",
                    where=name,
                    found=", ".join(sorted(twice)),
                    fix="rename one of them, or remove it",
                    why="only one of them would be used",
                    code="data-format",
                )
            )
        decode = _struct_decoder(batch.schema, name, "")
        parts = batch.to_batches() if hasattr(batch, "to_batches") else [batch]
        rows = (value for part in parts for value in _values(part))
        for index, value in enumerate(rows, start=start):
            where = f"{name}[{index}]"
            if isinstance(value, Exception):
                yield BadRow("unreadable", f"a value that can't be read: {value}", where)
                continue
            if value is None:
                yield too_many_values(where)
                continue
            found = without_nulls(value)
            yield _decoded(decode, found, where) if decode else Row(found, where)
        start += batch.num_rows


def _values(batch: pyarrow.RecordBatch) -> Iterator[Any]:
    """Yield each row of a batch as a mapping.

    If Python cannot represent a value of the row, yield the error. If the row has too many values, yield
    `None`.

    A file of 1,000 bytes can hold a row of 30,000,000 values. So the values are counted before Python creates
    them.
    """
    if batch.num_rows > 1 and count_values(batch) > MOST_VALUES:
        middle = batch.num_rows // 2
        yield from _values(batch.slice(0, middle))
        yield from _values(batch.slice(middle))
        return
    if batch.num_rows == 1 and count_values(batch) > MOST_VALUES:
        yield None
        return
    errors = (KeyError, ValueError, OverflowError)  # for example a duplicate key, or a year after 9999
    try:
        found = batch.to_pylist(maps_as_pydicts="strict")
    except errors as error:
        found = [error] if batch.num_rows == 1 else None
    if found is None:
        for index in range(batch.num_rows):
            yield from _values(batch.slice(index, 1))
    else:
        yield from found


def count_values(batch: pyarrow.RecordBatch) -> int:
    """Return how many values the rows of a batch hold: columns, fields of structs, and items of lists."""
    import pyarrow

    lists_and_structs = (
        pyarrow.ListArray, pyarrow.LargeListArray, pyarrow.FixedSizeListArray, pyarrow.StructArray,
    )  # fmt: skip
    count, waiting = 0, list(batch.columns)
    while waiting:
        array = waiting.pop()
        if isinstance(array, pyarrow.ExtensionArray):
            waiting.append(array.storage)
            continue
        count += len(array)
        if isinstance(array, pyarrow.MapArray):  # `keys` and `items` also hold the entries of other rows
            first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            waiting.append(array.items.slice(first, end - first))
        elif isinstance(array, lists_and_structs):
            parts = array.flatten()
            waiting += parts if isinstance(parts, list) else [parts]
    return count


def without_nulls(value: object) -> Any:
    """Remove the keys whose value is null.

    A column gives every mapping the keys of all mappings (tool arguments).
    """
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def _decoded(decode: Decoder, value: object, where: str) -> Row | BadRow:
    try:
        return checked_row(decode(value), where, escapes=True)
    except (ValueError, RecursionError) as error:
        return BadRow("unreadable", f"not valid JSON in a column of type arrow.json: {error}", where)


def _decoder(kind: pyarrow.DataType, name: str, column: str) -> Decoder | None:
    """Return the function that decodes a value as `datasets` does; `None` if values stay as they are."""
    import pyarrow
    from pyarrow import types

    if isinstance(kind, pyarrow.BaseExtensionType):
        return _extension_decoder(kind, name, column)
    if types.is_struct(kind):
        return _struct_decoder(kind, name, f"{column}.")
    if types.is_dictionary(kind) and not _shares_values(kind):
        return _decoder(kind.value_type, name, column)
    if types.is_map(kind):
        decode = _field_decoder(kind.item_field, name, column)
        return (lambda value: {key: _apply(decode, part) for key, part in value.items()}) if decode else None
    if _shares_values(kind):
        raise _not_read(f"type {kind}", name, column)
    if types.is_nested(kind) and hasattr(kind, "value_field"):  # every list type
        decode = _field_decoder(kind.value_field, name, column)
        return (lambda value: [_apply(decode, part) for part in value]) if decode else None
    return None


def _shares_values(kind: pyarrow.DataType) -> bool:
    """Return whether several rows can share one stored value.

    A small file of such a type can fill the memory.
    """
    from pyarrow import types

    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    if types.is_dictionary(kind) and types.is_nested(kind.value_type):
        return True
    return views or types.is_run_end_encoded(kind) or types.is_union(kind)


def _extension_decoder(kind: pyarrow.BaseExtensionType, name: str, column: str) -> Decoder | None:
    import pyarrow

    if isinstance(kind, pyarrow.JsonType):
        return DECODER.decode
    if isinstance(kind, pyarrow.UuidType):
        return str
    vector = isinstance(kind, pyarrow.FixedShapeTensorType) and len(kind.shape) == 1
    if vector or isinstance(kind, pyarrow.Bool8Type) or kind.extension_name.startswith(ARRAYS):
        return None
    raise _not_read(f"extension type {kind.extension_name}", name, column)


def _field_decoder(field: pyarrow.Field, name: str, column: str) -> Decoder | None:
    unknown = (field.metadata or {}).get(EXTENSION, b"").decode()
    if unknown and not unknown.startswith(ARRAYS):
        raise _not_read(f"extension type {unknown}", name, column)
    return _decoder(field.type, name, column)


def _struct_decoder(fields: Iterable[pyarrow.Field], name: str, prefix: str) -> Decoder | None:
    found = {field.name: _field_decoder(field, name, f"{prefix}{field.name}") for field in fields}
    decoders = {key: decode for key, decode in found.items() if decode}
    if not decoders:
        return None
    return lambda value: {key: _apply(decoders.get(key), part) for key, part in value.items()}


def _apply(decode: Decoder | None, value: object) -> Any:
    return value if decode is None or value is None else decode(value)


def _not_read(kind: str, name: str, column: str) -> UserError:
    return UserError(
        Problem(
            f"finetune can't read the Arrow {kind} of the column {column}",
            where=name,
            found=kind,
            fix=f'remove the column: table.drop_columns(["{column.partition(".")[0]}"])',
            why="it has no plain value in JSON",
            code="data-format",
        )
    )
