"""Read the examples of a task file in lm-eval's form.

`datasets` would download from addresses in a folder's README.md, unpack archives and open pickles in a .tar.
So finetune finds local files with known suffixes and reads them with its own readers.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.core.errors import Problem, UserError
from finetune.core.folder_search import match_paths
from finetune.core.paths import can_be_path, local_path, similar_files
from finetune.data import dataset_folders, hub_datasets, read_limits
from finetune.data.examples import BadRow, Row
from finetune.data.json_values import MOST_VALUES
from finetune.data.readers import READERS, read_file
from finetune.evaluation import task_datasets
from finetune.hub import client

LOADERS = {  # dataset_path -> suffixes of its files
    "json": (".json", ".jsonl"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt",),
}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
MOST_FILES = 10_000
MOST_COLUMNS = 10_000  # of a CSV file
KEY = "dataset_path"


NAME_A_FILE = "name a file in the folder of the task file"


def source(task: dict[str, Any], where: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that gives lm-eval the splits of a task. This call already finds the local files.

    Args:
        task: a validated task.
        where: its file.

    Raises:
        UserError: a file, split or dataset does not exist, or finetune cannot read the format (exit 2).
    """
    files = local_files(task, where)
    if files is not None:
        _check_splits(task, files, where)
        return lambda **_: {split: _dataset(paths) for split, paths in files.items()}
    hub_datasets.check_name(task[KEY], KEY, str(where))
    return lambda **_: _of_the_hub(task, where)


def commit(task: dict[str, Any]) -> str:
    """Return the current commit of the Hub dataset of a task. Without an answer, return its revision."""
    revision = (task.get("dataset_kwargs") or {}).get("revision")
    return client.dataset_commit(task[KEY], revision or "main")


def local_files(task: dict[str, Any], where: Path) -> dict[str, list[Path]] | None:
    """Return the local files of a task by split, or `None` if it names a Hub dataset."""
    path, kwargs = task[KEY], task.get("dataset_kwargs") or {}
    inside = kwargs.get("data_dir") or ""
    for key, name in ((KEY, path), ("dataset_kwargs.data_dir", inside)):
        if not can_be_path(name):
            raise UserError(
                Problem(
                    "this name can't be a folder name",
                    key,
                    where=str(where),
                    found=name[:200],
                    fix="name a folder next to the task file",
                    code="data-not-found",
                )
            )
    if path in LOADERS:
        suffixes, folder = LOADERS[path], None
    elif folder := _existing_folder(path, where):
        suffixes = tuple(READERS)
    elif local_path(path):
        near = similar_files(where.parent / path)
        near = os.path.relpath(near, where.parent) if os.path.exists(near) else "json"
        raise UserError(
            Problem(
                "the dataset does not exist",
                KEY,
                where=str(where),
                found=path,
                expected=f"{', '.join(LOADERS)}, a folder, or a dataset on the Hub",
                fix=f"{KEY}: {near}",
                why="a path starts at the folder of the task file",
                code="data-not-found",
            )
        )
    else:
        return None
    return _splits_in(folder, task, where, suffixes)


def _splits_in(
    folder: Path | None, task: dict[str, Any], where: Path, suffixes: tuple[str, ...]
) -> dict[str, list[Path]]:
    """Return the files of a task by split, in the folder of its dataset, or next to the task file."""
    path, kwargs = task[KEY], task.get("dataset_kwargs") or {}
    named, inside = kwargs.get("data_files"), kwargs.get("data_dir")
    if inside:
        folder = _folder_in(folder, inside, where)
    if named is not None:
        splits = named if isinstance(named, dict) else {"train": named}
        return {split: _matches(patterns, folder, where, suffixes) for split, patterns in splits.items()}
    if folder is None:
        raise UserError(
            Problem(
                f"`dataset_path: {path}` needs the names of its files",
                "dataset_kwargs",
                where=str(where),
                fix=f"dataset_kwargs: {{data_files: {{test: test.{'jsonl' if path == 'json' else path}}}}}",
                why=f"{path} is a file type, not a dataset",
                code="missing-key",
            )
        )
    found = dataset_folders.all_splits(folder, KEY, task.get("dataset_name"))
    _check_suffixes(list(chain.from_iterable(found.values())), suffixes, where)
    return found


def _existing_folder(name: str, where: Path) -> Path | None:
    """Return a folder next to the task file or in the working directory."""
    places = (where.parent / name, Path(os.path.expanduser(name)))
    return next((place for place in places if place.is_dir()), None)


def _folder_in(folder: Path | None, name: str, where: Path) -> Path:
    found = folder / name if folder else _existing_folder(name, where)
    leaves = folder is not None and (PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts)
    if leaves or found is None or not found.is_dir():
        raise UserError(
            Problem(
                "the data folder does not exist",
                "dataset_kwargs.data_dir",
                where=str(where),
                found=name,
                fix="name a folder inside the folder of the dataset",
                code="data-not-found",
            )
        )
    return found


def not_fetched(key: str, where: str, address: str) -> Problem:
    """Return the problem of data at an address."""
    url = shlex.quote(address[:200])
    return Problem(
        "finetune does not download data from an address",
        key,
        where=where,
        found=address[:200],
        expected="a file, or a dataset on the Hub",
        fix=f"curl -LO {url}, then name the file here",
        why="a later run could read other data",
        code="data-not-found",
    )


def _matches(
    patterns: str | list[str], folder: Path | None, where: Path, suffixes: tuple[str, ...]
) -> list[Path]:
    """Return the files that match names and patterns, in order."""
    key, found = "dataset_kwargs.data_files", dict[Path, None]()
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        if "://" in pattern or "::" in pattern:
            raise UserError(not_fetched(key, str(where), pattern))
        if not can_be_path(pattern):
            raise UserError(
                Problem(
                    "this name can't be a file name",
                    key,
                    where=str(where),
                    found=pattern[:200],
                    fix=NAME_A_FILE,
                    why="it is too long, has a NUL character, or is a link to itself",
                    code="data-not-found",
                )
            )
        places = [folder] if folder else [where.parent, Path()]
        matches = next((files for place in places if (files := _files(place, pattern))), [])
        if not matches:
            raise UserError(
                Problem(
                    "no file has this name", key, str(where), pattern, fix=NAME_A_FILE, code="data-not-found"
                )
            )
        found |= dict.fromkeys(matches)
    if len(found) > MOST_FILES:
        raise UserError(
            Problem(
                "a split has too many files",
                key,
                where=str(where),
                found=f"{len(found):,} files",
                expected=f"at most {MOST_FILES:,}",
                fix="merge the files",
                code="data-size",
            )
        )
    _check_suffixes(list(found), suffixes, where)
    return list(found)


def _files(place: Path, pattern: str) -> list[Path]:
    path = place / os.path.expanduser(pattern)
    if path.is_file():
        return [path]
    matches = match_paths(str(path), Path(), KEY) if any(mark in pattern for mark in "*?[") else []
    return [match for match in matches if match.is_file()]


def _check_suffixes(paths: list[Path], suffixes: tuple[str, ...], where: Path) -> None:
    other = [path.name for path in paths if path.suffix not in suffixes]
    if other:
        raise UserError(
            Problem(
                "finetune can't read this type of file",
                KEY,
                where=str(where),
                found=", ".join(other[:5]),
                expected=", ".join(suffixes),
                fix=f"convert the file to {suffixes[0]}",
                code="data-format",
            )
        )


def _check_splits(task: dict[str, Any], files: dict[str, list[Path]], where: Path) -> None:
    named = [(key, task[key]) for key in SPLITS if task.get(key)]
    config = task.get("fewshot_config") or {}
    named += [("fewshot_config.split", config["split"])] if config.get("split") else []
    missing = [(key, split) for key, split in named if split not in files]
    if missing:
        raise UserError(
            *(
                Problem(
                    "the dataset has no split of this name",
                    key,
                    str(where),
                    split,
                    expected=", ".join(files) or "a folder with data files",
                    fix="name one of the splits" if files else "add data files to the folder",
                    code="data-not-found",
                )
                for key, split in missing
            )
        )


def examples(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the examples of files with the same columns in each.

    Raises:
        UserError: the files have no examples, or finetune can't read them (exit 2).
    """
    rows = [row for path in paths for row in _rows(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    if not rows:
        raise UserError(
            Problem(
                "the data of the task has no examples",
                KEY,
                where=", ".join(map(str, paths[:5])),
                found="0 examples",
                fix="add examples to the file",
                code="data-empty",
            )
        )
    if len(rows) * len(names) > max(MOST_VALUES, 2 * sum(map(len, rows))):
        raise _too_many(
            f"{len(names):,} columns in {len(rows):,} rows", "the same columns in each row", paths[0]
        )
    return [{name: row.get(name) for name in names} for row in rows]


def _too_many(found: str, expected: str, path: Path) -> UserError:
    return UserError(
        Problem(
            "the data of the task has too many columns",
            KEY,
            where=str(path),
            found=found,
            expected=expected,
            fix="keep only the columns that the task names",
            code="data-size",
        )
    )


def _dataset(paths: list[Path]) -> Any:
    """Return the examples of files as lm-eval reads them."""
    import pyarrow
    from datasets import Dataset

    rows, where = examples(paths), ", ".join(map(str, paths[:5]))
    try:  # `from_list` drops columns that the first example lacks
        return Dataset.from_list(rows, on_mixed_types="use_json")
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UserError(
            Problem(
                "a column has values of different types",
                KEY,
                where=where,
                found=str(error)[:200],
                fix="give all values of a column the same type",
                code="data-format",
            )
        ) from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".csv":
        yield from _csv(path)
    elif path.suffix == ".txt":
        (row,) = read_file(path)
        text = _value(row)["text"]
        lines = text.removesuffix("\n").split("\n") if text else []  # splitlines also splits at form feeds
        yield from ({"text": line} for line in lines)
    else:
        yield from map(_value, read_file(path))


def _value(row: BadRow | Row) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise UserError(row.problem)
    return row.value


def _csv(path: Path) -> list[dict[str, Any]]:
    """Read a CSV file with pandas, which gives the same column types as `datasets`."""
    import pandas

    with path.open("rb") as file:
        for number, line in enumerate(read_limits.limited_lines(file, path, read_limits.DEFAULT)):
            if number == 0 and line.count(b",") >= MOST_COLUMNS:
                raise _too_many(f"{line.count(b',') + 1:,} columns", f"at most {MOST_COLUMNS:,}", path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = pandas.read_csv(file)
    except (ValueError, OSError) as error:
        raise UserError(
            Problem(
                "the file is not valid CSV",
                KEY,
                where=str(path),
                found=str(error)[:200],
                fix="save the file again as CSV in UTF-8",
                code="data-format",
            )
        ) from error
    records = table.to_dict("records")
    return [{str(k): None if v != v else v for k, v in record.items()} for record in records]


def _of_the_hub(task: dict[str, Any], where: Path) -> dict[str, Any]:
    """Load all splits of a Hub dataset."""

    def choose(folder: Path) -> dict[str, list[Path]]:
        return _splits_in(folder, task, where, tuple(READERS))

    files = hub_datasets.splits(task[KEY], KEY, choose, commit(task))
    return task_datasets.as_datasets(files, KEY, texts=True)
