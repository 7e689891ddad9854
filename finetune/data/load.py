"""Rows from files or the Hub, one at a time, each with its place. What can't be read comes as a `BadRow`."""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import lzma
import os
import re
import tarfile
import zlib
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from finetune.data.formats import BadRow, Row
from finetune.errors import Exit, Problem, UserError
from finetune.recipe import local_path
from finetune.recipe_errors import similar_files
from finetune.sections import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.sections import Data

MAX_SHOWN = 5
RUNS_CODE = (".py", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy")
BOM = b"\xef\xbb\xbf"
BOOKKEEPING = ("dataset_info.json", "state.json")  # of a folder that `datasets` saved
COMMIT = re.compile(r"[0-9a-f]{40}")


Rows: TypeAlias = "Iterator[Row | BadRow]"


def sources(data: Data) -> list[Source]:
    """What `data.name` names, each with the revision, subset and split that hold for it."""
    named = [data.name] if isinstance(data.name, str) else data.name
    found = [Source(name=item) if isinstance(item, str) else item for item in named]
    defaults = {"revision": data.revision, "subset": data.subset, "split": data.split}
    return [
        source.model_copy(update={key: getattr(source, key) or value for key, value in defaults.items()})
        for source in found
    ]


def training(data: Data, source: Source, held_out: set[int], seed: int) -> Rows:
    """The rows of one source, less those that are held out.

    Raises:
        UserError: a file that is missing, empty or of a kind that is not read (exit 2).
    """
    rows = _read(source, "data.name")
    if not held_out:
        return rows
    return (row for row in rows if isinstance(row, BadRow) or row.digest(seed, data) not in held_out)


def validation(data: Data, held_out: set[int], seed: int) -> list[tuple[str, Rows]]:
    """The held-out rows by source: a file of their own, or a share of the training data."""
    if data.validation is not None:
        check_disjoint(data)
        return [(data.validation, _read(Source(name=data.validation), "data.validation"))]

    def chosen(source: Source) -> Rows:
        rows = _read(source, "data.name")
        return (row for row in rows if isinstance(row, Row) and row.digest(seed, data) in held_out)

    return [(source.name, chosen(source)) for source in sources(data)] if held_out else []


def draw_held_out(data: Data, seed: int) -> set[int]:
    """Digests of the rows that `data.validation_fraction` holds out; rows of equal content go together."""
    if data.validation_fraction is None:
        return set()
    rows = chain.from_iterable(_read(source, "data.name") for source in sources(data))
    digests = sorted(row.digest(seed, data) for row in rows if isinstance(row, Row))
    drawn = set(digests[: max(1, round(len(digests) * data.validation_fraction))])
    if digests and digests[-1] in drawn:
        what, found = "no row would be left to train on", f"{len(set(digests))} different rows"
        raise UserError(Problem(what, "data.validation_fraction", found=found))
    return drawn


def fingerprints(data: Data, held_out: bool = False) -> dict[str, str]:
    """Each file -> the sha256 of its content; each Hub data set -> the commit that was asked for.

    Args:
        held_out: only of the files that the held-out rows are read from.
    """
    found = {}
    named = [(Source(name=data.validation), "data.validation")] if data.validation else []
    if not (held_out and (data.validation or data.validation_fraction is None)):
        named += [(source, "data.name") for source in sources(data)]
    for source, key in named:
        paths = files(source.name, key)
        if paths is None:
            found[hub_name(source)] = _commit(source)
        for path in paths or ():
            with path.open("rb") as file:
                found[str(path.resolve())] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_disjoint(data: Data) -> None:
    """Held-out rows must not be trained on: no file may be both (exit 2)."""
    if data.validation is None:
        return
    held_out = files(data.validation, "data.validation")
    if held_out is None:
        what, fix = "held-out rows come from a file", "a file, or data.validation_fraction"
        raise UserError(Problem(what, "data.validation", found=data.validation, fix=fix))
    trained = chain.from_iterable(files(source.name, "data.name") or () for source in sources(data))
    both = {path.resolve() for path in trained} & {path.resolve() for path in held_out}
    if both:
        what, found = "a file is both trained on and held out", ", ".join(map(str, sorted(both)))
        fix = "name the training files one by one"
        raise UserError(Problem(what, "data.validation", found=found, fix=fix))


def files(name: str, key: str) -> list[Path] | None:
    """The local files that a name means; `None` for a Hub id.

    Raises:
        UserError: a path where nothing is, or a kind of file that is not read (exit 2).
    """
    path = Path(os.path.expanduser(name))
    in_a_folder = len(path.parts) > 1 and Path(path.parts[0]).is_dir()  # data/trian, where there is a data/
    if not (local_path(name) or in_a_folder):
        return None
    if any(mark in name for mark in "*?["):
        paths = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    elif path.is_dir():
        entries = sorted(entry for entry in path.iterdir() if entry.name not in BOOKKEEPING)
        paths = [
            entry for entry in entries if entry.suffix.lower() in READERS
        ]  # .JSONL is refused, not passed by
    else:
        paths = [path]
    missing = [entry for entry in paths if not entry.exists()]
    if missing or not paths:
        found = f"looked in {Path.cwd()} and beside the recipe"
        what = f"no {', '.join(READERS)} file in {name}" if path.is_dir() else f"no such file: {name}"
        raise UserError(Problem(what, key, found=found, fix="" if path.is_dir() else similar_files(path)))
    for entry in paths:
        if entry.suffix not in READERS:
            runs_code = "; such a file can run code when it is opened" if entry.suffix in RUNS_CODE else ""
            expected, what = ", ".join(READERS), f"can't read {entry.name}{runs_code}"
            raise UserError(Problem(what, key, found=entry.suffix, expected=expected))
    return paths


def _read(source: Source, key: str) -> Rows:
    paths = files(source.name, key)
    if paths is None:
        yield from _hub(source)
        return
    empty = True
    for path in paths:
        for row in READERS[path.suffix](path):
            empty = False
            yield row
    if empty:
        raise UserError(Problem(f"0 rows in {', '.join(map(str, paths))}", key))


def _json_lines(path: Path) -> Rows:
    with path.open("rb") as file:
        yield from json_lines(file, path)


def json_lines(lines: Iterable[bytes], path: Path, first: int = 1) -> Rows:
    """Rows of lines; `first` is the number of the first one."""
    offset = 0
    for number, line in enumerate(lines, start=first):
        text = line.removeprefix(BOM) if number == 1 else line
        if text.strip():
            try:
                yield _row(json.loads(text.decode()), f"{path}:{number}", _escapes(text))
            except UnicodeDecodeError as error:
                yield _not_utf8(path, number, offset + len(line) - len(text) + error.start, line)
            except (ValueError, RecursionError) as error:
                yield _not_json(path, number, text.decode(), error)
        offset += len(line)


def _json(path: Path) -> Rows:
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(BOM).lstrip()
    if not start.startswith(b"["):
        yield from _json_lines(path)
        return
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(_where_not_utf8(path).problem) from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        number = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        lines = text.split("\n")
        line = lines[number - 1] + "\n" * (number < len(lines))
        raise UserError(_not_json(path, number, line, error).problem) from None
    escapes = _escapes(content)
    for index, value in enumerate(values):
        yield _row(value, f"{path}[{index}]", escapes)


def _row(value: Any, where: str, escapes: bool) -> Row | BadRow:
    """A value of a JSON file; `escapes`: it may hold one half of a surrogate pair, which no text can."""
    if not isinstance(value, dict):
        return BadRow("unreadable", "a row must be a JSON object", where)
    if escapes:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = ascii(error.object[error.start])
            return BadRow("unreadable", "half of a surrogate pair, which is no character", where, found=found)
    return Row(value, where)


def _escapes(content: bytes) -> bool:
    return b"\\ud" in content or b"\\uD" in content


def _csv(path: Path) -> Rows:
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                problem = Problem("two columns of one name", where=f"{path}:1", found=", ".join(names))
                raise UserError(problem)
            while True:
                where = f"{path}:{reader.line_num + 1}"
                try:
                    fields = next(reader, None)
                except csv.Error as error:  # a quote that never closes takes in all that follows
                    yield BadRow("unreadable", f"not valid CSV: {error}", where)
                    continue
                if fields is None:
                    break
                if len(fields) == len(names):
                    yield Row(dict(zip(names, fields, strict=True)), where)
                elif fields:
                    expected, found = f"{len(names)} fields", str(len(fields))
                    what = "a row of another length"
                    yield BadRow("unreadable", what, where, expected=expected, found=found)
        except UnicodeDecodeError:
            raise UserError(_where_not_utf8(path).problem) from None


def _columnar(path: Path) -> Rows:
    """Parquet or Arrow, a batch of rows in memory at a time."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        with pyarrow.memory_map(str(path)) as content:
            if path.suffix == ".parquet":
                batches: Any = parquet.ParquetFile(content).iter_batches(batch_size=1000)
            else:
                batches = _arrow_batches(ipc, content)
            start = 0
            for batch in batches:
                for index, value in enumerate(batch.to_pylist(), start=start):
                    yield Row(_without_nulls(value), f"{path}[{index}]")
                start += batch.num_rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        found = (str(error).splitlines() or [""])[0]
        what = f"not a {path.suffix[1:]} file, or a damaged one"
        raise UserError(Problem(what, where=str(path), found=found)) from error


def _arrow_batches(ipc: Any, content: Any) -> Iterator[Any]:
    try:
        reader = ipc.open_file(content)
    except ValueError:  # the streaming format has no footer
        content.seek(0)
        yield from ipc.open_stream(content)
        return
    yield from map(reader.get_batch, range(reader.num_record_batches))


def _tar(path: Path) -> Rows:
    """A webdataset shard: the files that share a name up to the first dot are one row."""
    try:
        with tarfile.open(path, "r|*") as archive:
            for name, group in groupby(_members(archive), key=itemgetter(0)):
                yield _sample(group, f"{path}!{name}")
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise UserError(
            Problem("not a tar file, or a damaged one", where=str(path), found=str(error))
        ) from error
    with path.open("rb") as file:  # tarfile takes an archive that ends in a header for a whole one
        plain = file.read(262)[257:] == b"ustar"
        file.seek(-min(512, path.stat().st_size), 2)
        if plain and any(file.read()):
            raise UserError(Problem("the file looks cut off", where=str(path)))


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """Name up to the first dot, kind and content of each file."""
    for member in archive:
        opened = archive.extractfile(member) if member.isfile() else None
        if opened:
            stem, _, kind = Path(member.name).name.partition(".")
            yield str(Path(member.name).parent / stem), kind, opened.read()


def _sample(members: Iterable[tuple[str, str, bytes]], where: str) -> Row | BadRow:
    row: dict[str, Any] = {}
    bad = ""
    for _, kind, content in members:
        try:
            text = content.decode()
            value = json.loads(text) if kind == "json" else text
            row |= value if isinstance(value, dict) else {"text" if kind == "txt" else kind: value}
        except (ValueError, RecursionError):
            bad = bad or f"not text, or not JSON: .{kind}"
    return BadRow("unreadable", bad, where) if bad else _row(row, where, escapes=True)


def _txt(path: Path) -> Rows:
    try:
        yield Row({"text": path.read_text(encoding="utf-8-sig")}, str(path))
    except UnicodeDecodeError:
        raise UserError(_where_not_utf8(path).problem) from None


def _without_nulls(value: Any) -> Any:
    """A value less the keys that are null: columns give every mapping the keys of all (tool arguments)."""
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def hub_name(source: Source) -> str:
    """A Hub data set with its subset and split."""
    return " ".join(filter(None, (source.name, source.subset, source.split)))


def _commit(source: Source) -> str:
    """The commit a Hub data set is at; without a network, what the recipe says of it."""
    from huggingface_hub import HfApi

    asked = source.revision or "main"
    if COMMIT.fullmatch(asked):
        return asked
    try:
        return HfApi().dataset_info(source.name, revision=asked).sha or asked
    except (
        Exception
    ):  # whatever keeps the Hub from answering (no network, offline, gated): loading says which
        return asked


def _hub(source: Source) -> Rows:
    import datasets

    options: dict[str, Any] = {"revision": _commit(source), "split": source.split}
    try:
        dataset: Any = datasets.load_dataset(source.name, source.subset, **options)
    except (ConnectionError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fix = "check name, subset, split and network; without one: pin data.revision to a commit, and prepare"
        fix += " it elsewhere with finetune data RECIPE --prepare DIR"
        problem = Problem("the data set can't be loaded from the Hub", "data.name", found=reason, fix=fix)
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    for index, value in enumerate(dataset):
        yield Row(_without_nulls(value), f"{source.name}[{index}]")


READERS = {
    ".jsonl": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _columnar,
    ".arrow": _columnar,
    ".tar": _tar,
    ".txt": _txt,
}


def _where_not_utf8(path: Path) -> BadRow:
    """The first line of a file that is not UTF-8; a reader of text says only which of its chunks."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return _not_utf8(path, number, offset + error.start, line)
            offset += len(line)
    return BadRow("unreadable", "not UTF-8", str(path))


def _not_utf8(path: Path, line: int, offset: int, content: bytes) -> BadRow:
    guess = "UTF-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:80] else "Windows-1252"
    fix = f"save it as UTF-8 (it looks like {guess})"
    return BadRow("unreadable", "not UTF-8", f"{path}:{line}, byte {offset}", fix=fix)


def _not_json(path: Path, number: int, line: str, error: ValueError | RecursionError) -> BadRow:
    if not isinstance(error, json.JSONDecodeError):  # too deep, or a number of thousands of digits
        return BadRow("unreadable", f"not JSON that can be read: {error}", f"{path}:{number}")
    column, shown = error.colno, line.rstrip("\r\n")
    start, rest = max(0, column - 31), shown[column - 1 :].strip()
    cut = error.msg.startswith("Unterminated") or ("escape" in error.msg and len(rest) < len("\\u0000"))
    cut |= any(word.startswith(rest) for word in ("true", "false", "null", "-"))  # of nothing too
    what = "the file looks cut off" if cut and not line.endswith("\n") else "not valid JSON"
    where, found = f"{path}:{number}:{column}", shown[start : start + 60]
    return BadRow("unreadable", f"{what}: {error.msg}", where, found=found)
