"""Read each file type one row at a time, with the position of each row. A bad row is a `BadRow`."""

from __future__ import annotations

import contextlib
import csv
import json
import lzma
import re
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from finetune.core.errors import Problem, UserError, first_line
from finetune.core.paths import is_utf8, refuse_lfs_pointer
from finetune.data import hints, read_limits
from finetune.data.examples import BadRow, Row
from finetune.data.json_values import (
    DECODER,
    MOST_VALUES,
    checked_row,
    is_surely_small,
    may_hold_surrogates,
    too_many_values,
)
from finetune.data.read_limits import DEFAULT, ArchiveStream, Limits, RecordLines, limited_lines

BOM = b"\xef\xbb\xbf"
UTF_16 = (b"\xff\xfe", b"\xfe\xff")

Rows: TypeAlias = "Iterator[Row | BadRow]"


def _json_lines(path: Path, limits: Limits) -> Rows:
    with path.open("rb") as file:
        yield from json_lines(limited_lines(file, path, limits), path)


def json_lines(lines: Iterable[bytes], path: Path, first: int = 1) -> Rows:
    """Yield the rows of JSON lines. `first` is the number of the first line."""
    offset = 0
    for number, line in enumerate(lines, start=first):
        if number == 1 and line.startswith(UTF_16):  # every line of such a file would be unreadable
            raise UserError(_not_utf8(path, 1, 0, line).problem)
        text = line.removeprefix(BOM) if number == 1 else line
        if text.strip():
            try:
                escapes = may_hold_surrogates(text)
                value, is_small = DECODER.decode(text.decode()), is_surely_small(text)
                yield checked_row(value, f"{path}:{number}", escapes, is_small=is_small)
            except UnicodeDecodeError as error:
                yield _not_utf8(path, number, offset + len(line) - len(text) + error.start, line)
            except (ValueError, RecursionError) as error:
                yield _not_json(path, number, text.decode(), error)
        offset += len(line)


def _json(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a JSON file: one array of objects, one object, or lines as in a .jsonl file."""
    if path.stat().st_size > limits.example:
        try:
            yield from _large_json(path, limits)
        except UnicodeDecodeError:
            raise UserError(_where_not_utf8(path).problem) from None
        return
    with path.open("rb") as file:
        lines = (line.removeprefix(BOM).strip() for line in file)
        first, *more = [*islice(filter(None, lines), 2)] or [b""]
    array, over_lines = first.startswith(b"["), first.endswith((b"{", b"["))
    if more and not (array or over_lines):
        yield from _json_lines(path, limits)
        return
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(_where_not_utf8(path).problem) from None
    try:
        values = DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if not array and (not more or getattr(error, "msg", "") == "Extra data"):
            yield from _json_lines(path, limits)
            return
        number = error.lineno if isinstance(error, json.JSONDecodeError) else 0
        lines = text.split("\n")
        line = lines[number - 1] + "\n" * (number < len(lines))
        raise UserError(_not_json(path, number, line, error).problem) from None
    if isinstance(values, dict) and hints.of_columns(values):
        raise UserError(
            Problem(
                "the file is one JSON object of columns",
                where=str(path),
                found=", ".join(values)[:60],
                expected="an array of objects, one for each example",
                fix='with pandas: to_json(..., orient="records")',
                code="data-format",
            )
        )
    escapes, rows = may_hold_surrogates(content), values if array else [values]
    is_small = is_surely_small(content)
    for index, value in enumerate(rows):
        where = f"{path}[{index}]" if array else f"{path}:1"
        yield checked_row(value, where, escapes, is_small=is_small)


_ARRAY, _NEXT = re.compile(r"\s*\[\s*"), re.compile(r"\s*(?:([,\]])\s*)?")
_CHUNK = 2**20  # characters


def _large_json(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a JSON file that may not fit in memory, one item of the array at a time."""
    with path.open(encoding="utf-8-sig") as file:
        text, ended = file.read(_CHUNK), False
        start = _ARRAY.match(text)
        if start is None:
            yield from _json_lines(path, limits)
            return
        at, index, separator = start.end(), 0, ","
        while separator == ",":
            value, end, separator, fault = _next_of_array(text, at)
            if end - at > limits.example:
                raise read_limits.too_long(f"{path}[{index}]", limits)
            if end == len(text) and not ended:  # the chunk may end inside the example
                more = file.read(max(_CHUNK, end - at))
                text, at, ended, separator = (text[at:] + more).lstrip(), 0, not more, ","
                continue
            if fault:
                raise UserError(
                    Problem(
                        f"not valid JSON: {fault}",
                        where=f"{path}[{index}]",
                        found=text[at : at + 60],
                        fix=f"correct the JSON, or save the examples as JSON Lines ({path.stem}.jsonl)",
                        code="data-format",
                    )
                )
            yield checked_row(value, f"{path}[{index}]", True, is_small=is_surely_small(text[at:end]))
            at, index = end, index + 1
        rest = (text[at:] + file.read(_CHUNK)).strip()
        if rest:
            raise UserError(
                Problem(
                    "the file has more text after the JSON array",
                    where=str(path),
                    found=rest[:60],
                    fix="put all examples into one array, or save them as JSON Lines",
                    code="data-format",
                )
            )


def _next_of_array(text: str, at: int) -> tuple[Any, int, str, str]:
    """Return the next item, the position after it, the separator that follows, and an error.

    An error at the end of the text can disappear when more text is read.
    """
    try:
        value, end = DECODER.raw_decode(text, at)
        after = _NEXT.match(text, end)
        if after and after[1]:
            return value, after.end(), after[1], ""
        raise json.JSONDecodeError("neither , nor ] after an example", text, after.end() if after else end)
    except json.JSONDecodeError as error:
        is_cut = error.pos > len(text) - 10 or error.msg.startswith("Unterminated string")
        return None, len(text) if is_cut else at, ",", error.msg
    except (ValueError, RecursionError) as error:
        return None, at, ",", str(error)


QUOTES = 'put quotes around a field that contains a comma: "red, blue"'


def _csv(path: Path, limits: Limits) -> Rows:
    csv.field_size_limit(2**31 - 1)  # the default allows only 128 KiB per field
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = RecordLines(file, path, limits)
        reader = csv.reader(lines, strict=True)
        try:
            names = _header(reader, path)
            while True:
                where = f"{path}:{reader.line_num + 1}"
                lines.begin_record()
                try:
                    fields = next(reader, None)
                except csv.Error as error:  # a quote that is never closed consumes the remaining lines
                    yield BadRow("unreadable", f"not valid CSV: {error}", where)
                    continue
                if fields is None:
                    break
                if len(fields) == len(names):
                    yield Row(dict(zip(names, fields, strict=True)), where)
                elif fields:
                    yield BadRow(
                        "unreadable",
                        "the line has another number of fields than the header",
                        where,
                        expected=f"{len(names)} fields",
                        found=f"{len(fields)} field{'s' * (len(fields) != 1)}",
                        fix=QUOTES,
                    )
        except UnicodeDecodeError:
            raise UserError(_where_not_utf8(path).problem) from None


def _header(reader: Iterator[list[str]], path: Path) -> list[str]:
    """Return the column names in the first line."""
    try:
        names = next(reader, [])
    except csv.Error as error:  # for example "a";"b"
        with path.open(encoding="utf-8-sig") as file:
            names = [file.readline(_CHUNK).rstrip()]
        what, expected, fix = hints.separator(names) or (f"not valid CSV: {error}", "", "")
        raise UserError(
            Problem(
                what, where=f"{path}:1", found=names[0][:60], expected=expected, fix=fix, code="data-format"
            )
        ) from None
    if len(set(names)) < len(names):
        raise UserError(
            Problem(
                "two columns have the same name",
                where=f"{path}:1",
                found=", ".join(names),
                fix=f"rename one of the columns in the first line of {path.name}",
                why="a recipe names a column by its name",
                code="data-format",
            )
        )
    if len(names) > MOST_VALUES:
        raise UserError(too_many_values(f"{path}:1").problem)
    if wrong := hints.separator(names):
        what, expected, fix = wrong
        raise UserError(Problem(what, "", f"{path}:1", names[0], expected, fix, code="data-format"))
    return names


def _columnar(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a parquet or Arrow file, one batch in memory at a time."""
    import pyarrow

    from finetune.data import limited_batches
    from finetune.data.arrow_values import table_rows

    with _columnar_errors(path), pyarrow.memory_map(str(path)) as content:
        is_parquet = path.suffix == ".parquet"
        read = limited_batches.read_parquet if is_parquet else limited_batches.read_arrow
        yield from table_rows(limited_batches.limited(read(content, path, limits), path, limits), str(path))


@contextlib.contextmanager
def _columnar_errors(path: Path) -> Iterator[None]:
    """Convert pyarrow's errors to a UserError, because the user can fix the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:  # KeyError: an odd column
        found = (str(error).splitlines() or [""])[0]
        kind = "a Parquet" if path.suffix == ".parquet" else "an Arrow"
        raise UserError(
            Problem(
                f"the file is damaged or is not {kind} file",
                where=str(path),
                found=found,
                fix="copy or download the file again",
                code="data-format",
            )
        ) from error


def _tar(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a webdataset shard. Files with the same name up to the first dot form one row."""
    try:
        with (
            path.open("rb") as file,
            ArchiveStream(file, path, limits) as content,
            tarfile.open(fileobj=content, mode="r:", tarinfo=_headers_of(content)) as archive,
        ):
            seen = set[int]()  # hashes of names, so that millions of members fit in memory
            for name, group in groupby(_members(archive, path, limits), key=itemgetter(0)):
                yield _sample(group, f"{path}!{name}", hash(name) in seen)
                seen.add(hash(name))
            _check_end(content, path)
    except (
        tarfile.TarError, EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, RecursionError,
    ) as error:  # fmt: skip
        raise UserError(
            Problem(
                "the file is damaged or is not a tar file",
                where=str(path),
                found=str(error),
                fix="copy or download the file again",
                code="data-format",
            )
        ) from error


def _headers_of(content: ArchiveStream) -> type[tarfile.TarInfo]:
    """Return the class that reads the headers of an archive. It tells `content` where a pax header is."""

    class Header(tarfile.TarInfo):
        @classmethod
        def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Header:
            found: Any = super().frombuf(buf, encoding, errors)
            content.next_is_pax = found.type in PAX
            return found

    return Header


def _check_end(content: ArchiveStream, path: Path) -> None:
    """Refuse an archive without its final zeros. tarfile takes any block that is no header for the end."""
    header = content.last
    if header and not any(header) and not content.rest():
        return
    is_cut = len(header) < tarfile.BLOCKSIZE
    raise UserError(
        Problem(
            "the tar file is cut off" if is_cut else "the tar file is damaged, or is several files in one",
            where=str(path),
            found="" if is_cut else "more content after a block that is not the header of a file",
            fix="copy or download the file again, or pack its files again",
            code="data-format",
        )
    )


PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
MOST_WITHOUT_CONTENT = 10_000  # folders and links in a row, without a file between them


def _members(archive: Any, path: Path, limits: Limits) -> Iterator[tuple[str, str, bytes]]:
    """Yield the name up to the first dot, the extension and the content of each file."""
    last, size, others = "", 0, 0
    while member := archive.next():
        archive.members.clear()  # tarfile would keep an entry for each file
        opened = archive.extractfile(member) if member.isfile() else None
        others = 0 if opened else others + 1
        if others > MOST_WITHOUT_CONTENT:
            raise UserError(
                Problem(
                    "the tar file has too many folders and links without a file between them",
                    where=str(path),
                    expected=f"at most {MOST_WITHOUT_CONTENT:,}",
                    fix="pack the files again without empty folders and links",
                    code="data-size",
                )
            )
        if opened:
            if not is_utf8(Path(member.name)):
                raise UserError(
                    Problem(
                        "the name of a file in the archive is not UTF-8",
                        where=str(path),
                        found=ascii(member.name)[:200],
                        fix="rename the file, and pack the files again",
                        code="data-format",
                    )
                )
            stem, _, kind = Path(member.name).name.partition(".")
            name = str(Path(member.name).parent / stem)
            size = member.size if name != last else size + member.size
            last = name
            if size > limits.example:
                raise read_limits.too_long(f"{path}!{name}", limits)
            yield name, kind, opened.read()


def _sample(members: Iterable[tuple[str, str, bytes]], where: str, repeated: bool) -> Row | BadRow:
    """Return the row of the members with one name.

    Args:
        repeated: whether the archive has members of this name before other members.
    """
    row: dict[str, Any] = {}
    bad = "members of this name stand twice in the archive" if repeated else ""
    for _, kind, content in members:
        try:
            text = content.decode()
            value = DECODER.decode(text) if kind == "json" else text
            new = value if isinstance(value, dict) else {"text" if kind == "txt" else kind: value}
            if twice := [key for key in new if key in row]:
                bad = bad or f"two members of the archive give the column {twice[0]}"
            row |= new
        except (ValueError, RecursionError):
            bad = bad or f"the member .{kind} is not UTF-8 text or not JSON"
    return BadRow("unreadable", bad, where) if bad else checked_row(row, where, escapes=True)


def _txt(path: Path, limits: Limits) -> Rows:
    read_limits.check_size(path, limits)
    try:
        yield Row({"text": path.read_text(encoding="utf-8-sig")}, str(path))
    except UnicodeDecodeError:
        raise UserError(_where_not_utf8(path).problem) from None


def read_file(path: Path, limits: Limits = DEFAULT) -> Rows:
    """Yield every row of a file, in order.

    Raises:
        UserError: the file is a Git LFS pointer, cannot be opened by its reader, or exceeds the limits (exit
            2).
    """
    refuse_lfs_pointer(path)
    yield from READERS[path.suffix](path, limits)


def can_read(path: Path) -> bool:
    """Return whether the name of a file has a suffix that finetune reads, such as .jsonl or .jsonl.gz."""
    return path.suffix in READERS and (path.suffix not in PACKED or Path(path.stem).suffix in PLAIN)


def kind(path: Path) -> str:
    """Return the suffix of a file in lower case, without the suffix of its compression."""
    name = Path(path.stem) if path.suffix in PACKED else path
    return name.suffix.lower()


def _packed(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a compressed file within the limits.

    JSON Lines and tar files are decompressed as they are read, and others to a temporary file.
    """
    inner = Path(path.stem)
    if inner.suffix == ".tar":
        yield from _tar(path, limits)
        return
    if inner.suffix == ".jsonl":
        yield from json_lines(lines_of(path, limits), path)
        return
    # A reader that is not read to its end lives until the garbage collector closes it. It runs `finally`
    folder = Path(tempfile.mkdtemp(prefix="finetune-"))
    try:
        plain = folder / inner.name
        with path.open("rb") as file, plain.open("wb") as target, _unpacking(path):
            content = ArchiveStream(file, path, limits)
            while block := content.read(min(_CHUNK, limits.example)):
                target.write(block)
        yield from renamed(READERS[inner.suffix](plain, limits), str(plain), str(path))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def lines_of(path: Path, limits: Limits) -> Iterator[bytes]:
    """Yield the lines of a plain or compressed file."""
    with path.open("rb") as file, _unpacking(path):
        if path.suffix in PACKED:
            yield from _lines(ArchiveStream(file, path, limits), path, limits)
        else:
            yield from limited_lines(file, path, limits)


def _lines(content: ArchiveStream, path: Path, limits: Limits) -> Iterator[bytes]:
    """Yield the lines of a decompressed stream."""
    begun, size, number = list[bytes](), 0, 1
    while block := content.read(min(_CHUNK, limits.example)):
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*begun, line, b"\n"])
            begun, size, number = [], 0, number + 1
        begun, size = [*begun, rest] if rest else begun, size + len(rest)
        if size > limits.example:
            raise read_limits.too_long(f"{path}:{number}", limits)
    if begun:
        yield b"".join(begun)


@contextlib.contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the disk; bz2 and gzip set no number
            raise
        raise UserError(
            Problem(
                "the compressed file is damaged",
                where=str(path),
                found=first_line(error),
                fix="download or compress the file again",
                code="data-format",
            )
        ) from error


def renamed(rows: Rows, path: str, name: str) -> Rows:
    """Yield rows, and raise errors, with the name of a file in place of the path from which they are read."""
    try:
        for row in rows:
            if isinstance(row, BadRow):
                row.problem = _moved(row.problem, path, name)
                yield row
            else:
                yield Row(row.value, row.where.replace(path, name, 1))
    except UserError as error:
        problems = [_moved(problem, path, name) for problem in error.problems]
        raise UserError(*problems, code=error.code) from error


def _moved(problem: Problem, path: str, name: str) -> Problem:
    return replace(problem, where=problem.where.replace(path, name), found=problem.found.replace(path, name))


def count_rows(path: Path, limits: Limits = DEFAULT) -> int:
    """Return the number of rows of a file, good or bad. Parquet files store the number in their metadata."""
    refuse_lfs_pointer(path)
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in limited_lines(file, path, limits) if line.strip())
    if path.suffix not in (".parquet", ".arrow"):
        return sum(1 for _ in READERS[path.suffix](path, limits))
    import pyarrow
    from pyarrow import parquet

    from finetune.data import limited_batches

    with _columnar_errors(path), pyarrow.memory_map(str(path)) as content:
        if path.suffix == ".parquet":
            return parquet.ParquetFile(content).metadata.num_rows
        return sum(batch.num_rows for batch in limited_batches.read_arrow(content, path, limits))


PACKED = (".gz", ".bz2", ".xz")
READERS = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _columnar,
    ".arrow": _columnar,
    ".tar": _tar,
    ".txt": _txt,
    **dict.fromkeys(PACKED, _packed),
}
PLAIN = [suffix for suffix in READERS if suffix not in PACKED]
SUFFIXES = f"{', '.join(PLAIN)}, also with {', '.join(PACKED)}"


def _where_not_utf8(path: Path) -> BadRow:
    """Return the error for the first line that is not UTF-8.

    Python's own error names only a chunk of the file.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return _not_utf8(path, number, offset + error.start, line)
            offset += len(line)
    return BadRow("unreadable", "the file is not UTF-8", str(path))


def _not_utf8(path: Path, line: int, offset: int, content: bytes) -> BadRow:
    like = "UTF-16" if content.startswith(UTF_16) or b"\0" in content[:80] else "Windows-1252"
    return BadRow(
        "unreadable",
        "the line is not UTF-8",
        f"{path}:{line}, byte {offset}",
        fix=f"save the file as UTF-8 (it looks like {like})",
    )


def _not_json(path: Path, number: int, line: str, error: ValueError | RecursionError) -> BadRow:
    # Too deep nesting, a duplicate key, or a number with thousands of digits
    if not isinstance(error, json.JSONDecodeError):
        # The parser gives no line for an item of an array
        return BadRow(
            "unreadable",
            f"finetune can't read this JSON: {error}",
            f"{path}:{number}" if number else str(path),
        )
    column, shown = error.colno, line.rstrip("\r\n")
    start, rest = max(0, column - 31), shown[column - 1 :].strip()
    cut = error.msg.startswith("Unterminated") or ("escape" in error.msg and len(rest) < len("\\u0000"))
    # The file may also end inside one of these values
    cut |= any(word.startswith(rest) for word in ("true", "false", "null", "-"))
    what = "the file is cut off" if cut and not line.endswith("\n") else "not valid JSON"
    return BadRow(
        "unreadable",
        f"{what}: {error.msg}",
        f"{path}:{number}:{column}",
        shown[start : start + 60],
        fix="" if "cut off" in what else hints.line(shown),
    )
