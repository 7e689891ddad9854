"""Rows from files or the Hub, with the place of every row that can't be read."""

from __future__ import annotations

import glob
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import Exit, Problem, UserError
from finetune.recipe import local_path
from finetune.recipe_errors import similar_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.recipe import Data

SUFFIXES = (".jsonl", ".json")
MAX_SHOWN = 5


@dataclass(frozen=True)
class Row:
    value: dict[str, Any]
    where: str  # file:line, or name[index]


@dataclass
class Split:
    """What became of the rows of one split; the run folder's `data_report.json` holds it."""

    sources: dict[str, str] = field(default_factory=dict)
    """File -> sha256 of its content (Hub data: its fingerprint)."""
    rows: int = 0
    format: str = ""
    kept: int = 0
    too_long: int = 0
    nothing_trained: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    longest: int = 0
    ends_trained: int = 0
    """Kept rows whose last trained token ends the turn."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def read(data: Data, seed: int) -> tuple[list[Row], list[Row], dict[str, str]]:
    """All rows to train on, all held-out rows, and a hash for each source.

    Raises:
        UserError: a file that is missing, empty or holds a row that is not a JSON object (exit 2).
    """
    hashes: dict[str, str] = {}
    rows = _rows(data.name, "data.name", data, hashes)
    if data.validation is not None:
        check_disjoint(data)
        return rows, _rows(data.validation, "data.validation", data, hashes), hashes
    if data.validation_fraction is None:
        return rows, [], hashes
    count = max(1, round(len(rows) * data.validation_fraction))
    order = sorted(range(len(rows)), key=lambda i: hashlib.sha256(f"{seed}:{i}".encode()).digest())
    chosen = set(order[:count])
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return train, [row for i, row in enumerate(rows) if i in chosen], hashes


def held_out(data: Data, seed: int) -> tuple[list[Row], dict[str, str]]:
    """The held-out rows alone, and hashes of the files read: training data only if they are a share of it."""
    hashes: dict[str, str] = {}
    if data.validation is not None:
        return _rows(data.validation, "data.validation", data, hashes), hashes
    if data.validation_fraction is None:
        return [], hashes
    _, rows, hashes = read(data, seed)
    return rows, hashes


def check_disjoint(data: Data) -> None:
    """Held-out rows must not be trained on: no file may be both (exit 2)."""
    if data.validation is None:
        return
    validation = files(data.validation, "data.validation")
    if validation is None:
        what, fix = "held-out rows come from a file", "a file, or data.validation_fraction"
        raise UserError(Problem(what, "data.validation", found=data.validation, fix=fix))
    trained = files(data.name, "data.name") or ()
    both = {path.resolve() for path in trained} & {path.resolve() for path in validation}
    if both:
        what, found = "a file is both trained on and held out", ", ".join(map(str, sorted(both)))
        fix = "name the training files one by one"
        raise UserError(Problem(what, "data.validation", found=found, fix=fix))


def files(name: str | list[str], key: str) -> list[Path] | None:
    """The local files that `data.name` or `data.validation` means; `None` for a Hub id.

    Raises:
        UserError: a path where nothing is, or a kind of file that is not read (exit 2).
    """
    if isinstance(name, list):
        found = [files(item, key) for item in name]
        if None in found:
            raise UserError(Problem("a list holds files only", key, fix="one Hub id, or files"))
        return [path for paths in found for path in paths or ()]
    if not local_path(name):
        return None
    path = Path(name)
    if any(mark in name for mark in "*?["):
        paths = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    elif path.is_dir():
        paths = sorted(entry for entry in path.iterdir() if entry.suffix in SUFFIXES)
    else:
        paths = [path]
    missing = [entry for entry in paths if not entry.exists()]
    if missing or not paths:
        found = f"looked in {Path.cwd()} and beside the recipe"
        what = f"no {' or '.join(SUFFIXES)} file in {name}" if path.is_dir() else f"no such file: {name}"
        raise UserError(Problem(what, key, found=found, fix="" if path.is_dir() else similar_files(path)))
    for entry in paths:
        if entry.suffix not in SUFFIXES:
            expected = " or ".join(SUFFIXES)
            raise UserError(Problem(f"can't read {entry.name}", key, found=entry.suffix, expected=expected))
    return paths


def _rows(name: str | list[str], key: str, data: Data, hashes: dict[str, str]) -> list[Row]:
    paths = files(name, key)
    if paths is None:
        return _hub_rows(str(name), data, hashes)
    rows = []
    for path in paths:
        content = path.read_bytes()
        hashes[str(path.resolve())] = hashlib.sha256(content).hexdigest()
        rows += list(_file_rows(path, content))
    if not rows:
        raise UserError(Problem(f"0 rows in {', '.join(map(str, paths))}", key))
    return rows


def _file_rows(path: Path, content: bytes) -> Iterator[Row]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        where = f"{path}:{line}, byte {error.start}"
        raise UserError(Problem("not UTF-8", where=where, fix="save the file as UTF-8")) from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from _json_array(path, text)
        return
    lines = text.split("\n")
    bad = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield Row(_object(json.loads(line)), f"{path}:{number}")
            except ValueError as error:
                last = not any(map(str.strip, lines[number:]))
                bad.append(_bad_line(path, number, line, error, last))
    _raise_bad(bad, path)


def _json_array(path: Path, text: str) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            _bad_line(path, error.lineno, text.split("\n")[error.lineno - 1], error, False)
        ) from None
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            raise UserError(
                Problem("a row must be a JSON object", where=f"{path}[{index}]", found=str(value)[:60])
            )
        yield Row(value, f"{path}[{index}]")


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a row must be a JSON object")
    return value


def _bad_line(path: Path, number: int, line: str, error: ValueError, last: bool) -> Problem:
    column = error.colno if isinstance(error, json.JSONDecodeError) else 1
    start = max(0, column - 31)
    cut = (
        last
        and isinstance(error, json.JSONDecodeError)
        and column >= len(line) - 1
        and not line.endswith("}")
    )
    what = "the file looks cut off" if cut else "not valid JSON"
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return Problem(f"{what}: {reason}", where=f"{path}:{number}:{column}", found=line[start : start + 60])


def _raise_bad(bad: list[Problem], path: Path) -> None:
    if bad:
        count = Problem(f"{len(bad)} rows of {path} can't be read") if len(bad) > MAX_SHOWN else None
        raise UserError(*bad[:MAX_SHOWN], *([count] if count else []))


def _hub_rows(name: str, data: Data, hashes: dict[str, str]) -> list[Row]:
    import datasets

    try:
        dataset: Any = datasets.load_dataset(name, revision=data.revision, split=data.split)
    except (ConnectionError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        fix = "check the name and the network, or download it and give a path"
        problem = Problem("the data set can't be loaded from the Hub", "data.name", found=reason, fix=fix)
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    hashes[name] = dataset._fingerprint
    return [Row(row, f"{name}[{index}]") for index, row in enumerate(dataset)]
