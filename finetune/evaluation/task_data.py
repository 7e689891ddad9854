"""Read the examples of a task file in lm-eval's form.

`datasets` would download from addresses in a folder's README.md, unpack archives and open pickles in a .tar.
So finetune finds local files with known suffixes and reads them with its own readers.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.core.folder_search import match_paths
from finetune.core.paths import can_be_path, local_path
from finetune.data import dataset_folders, hub_datasets
from finetune.data.examples import BadRow
from finetune.data.readers import READERS, read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOADERS = {  # dataset_path -> suffixes of its files
    "json": (".json", ".jsonl"),
    "csv": (".csv",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "text": (".txt",),
}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
MOST_FILES = 10_000
KEY = "dataset_path"


def source(task: dict[str, Any], where: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that gives lm-eval the splits of a task. This call already finds the local files.

    Args:
        task: a validated task.
        where: its file.

    Raises:
        UserError: a file, split or dataset does not exist, or finetune cannot read the format (exit 2).
    """
    kwargs = task.get("dataset_kwargs") or {}
    files = local_files(task, where)
    if files is not None:
        _check_splits(task, files, where)
        return lambda **_: {split: _dataset(paths) for split, paths in files.items()}
    hub_datasets.check_name(task[KEY], KEY, str(where))
    options = {key: kwargs.get(key) for key in ("data_files", "data_dir")}
    given = task[KEY], task.get("dataset_name"), kwargs.get("revision")
    return lambda **_: _of_the_hub(*given, **options)


def local_files(task: dict[str, Any], where: Path) -> dict[str, list[Path]] | None:
    """Return the local files of a task by split, or `None` if it names a Hub dataset."""
    path, kwargs = task[KEY], task.get("dataset_kwargs") or {}
    named, inside = kwargs.get("data_files"), kwargs.get("data_dir") or ""
    for key, name in ((KEY, path), ("dataset_kwargs.data_dir", inside)):
        if not can_be_path(name):
            raise UserError(Problem("not the name of a folder", key, str(where), name[:200]))
    if path in LOADERS:
        suffixes, folder = LOADERS[path], None
    elif folder := _existing_folder(path, where):
        suffixes = tuple(READERS)
    elif local_path(path):
        what, expected = "no such data here", f"{', '.join(LOADERS)}, a folder, or a dataset on the Hub"
        raise UserError(Problem(what, KEY, str(where), path, expected))
    else:
        return None
    if inside:
        folder = _folder_in(folder, inside, where)
    if named is not None:
        splits = named if isinstance(named, dict) else {"train": named}
        return {split: _matches(patterns, folder, where, suffixes) for split, patterns in splits.items()}
    if folder is None:
        what, fix = f"{path} needs its files", "dataset_kwargs: {data_files: {test: rows.jsonl}}"
        raise UserError(Problem(what, "dataset_kwargs", str(where), fix=fix))
    found = dataset_folders.all_splits(folder, KEY, task.get("dataset_name"))
    _check_suffixes(list(chain.from_iterable(found.values())), suffixes, where)
    return found


def _existing_folder(name: str, where: Path) -> Path | None:
    """Return a folder next to the task file or in the working directory."""
    places = (where.parent / name, Path(name).expanduser())
    return next((place for place in places if place.is_dir()), None)


def _folder_in(folder: Path | None, name: str, where: Path) -> Path:
    found = folder / name if folder else _existing_folder(name, where)
    leaves = folder is not None and (PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts)
    if leaves or found is None or not found.is_dir():
        raise UserError(Problem("no such folder of data", "dataset_kwargs.data_dir", str(where), name))
    return found


def _matches(patterns: Any, folder: Path | None, where: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files that match names and patterns, in order."""
    found: dict[Path, None] = {}
    for pattern in patterns if isinstance(patterns, list) else [patterns]:
        if "://" in pattern or "::" in pattern:
            what, expected = "data are not fetched from an address", "a file, or a Hub id"
            raise UserError(Problem(what, "dataset_kwargs.data_files", str(where), pattern, expected))
        if not can_be_path(pattern):
            what = "not the name of a file"
            raise UserError(Problem(what, "dataset_kwargs.data_files", str(where), pattern[:200]))
        places = [folder] if folder else [where.parent, Path()]
        matches = next((files for place in places if (files := _files(place, pattern))), [])
        if not matches:
            what = "no such file"
            raise UserError(Problem(what, "dataset_kwargs.data_files", str(where), pattern))
        found |= dict.fromkeys(matches)
    if len(found) > MOST_FILES:
        what, expected = f"{len(found):,} files of one split", f"at most {MOST_FILES:,}"
        raise UserError(Problem(what, "dataset_kwargs.data_files", str(where), expected=expected))
    _check_suffixes(list(found), suffixes, where)
    return list(found)


def _files(place: Path, pattern: str) -> list[Path]:
    path = place / Path(pattern).expanduser()
    if path.is_file():
        return [path]
    matches = match_paths(str(path), Path(), KEY) if any(mark in pattern for mark in "*?[") else []
    return [match for match in matches if match.is_file()]


def _check_suffixes(paths: list[Path], suffixes: tuple[str, ...], where: Path) -> None:
    other = [path.name for path in paths if path.suffix not in suffixes]
    if other:
        what, found = "no such data here: a kind of file that is not read", ", ".join(other[:5])
        raise UserError(Problem(what, KEY, str(where), found, ", ".join(suffixes)))


def _check_splits(task: dict[str, Any], files: dict[str, list[Path]], where: Path) -> None:
    named = [(key, task[key]) for key in SPLITS if task.get(key)]
    config = task.get("fewshot_config") or {}
    named += [("fewshot_config.split", config["split"])] if config.get("split") else []
    missing = [(key, split) for key, split in named if split not in files]
    if missing:
        expected = ", ".join(files) or "a folder with data files"
        raise UserError(
            *(Problem("no such split", key, str(where), split, expected) for key, split in missing)
        )


def _dataset(paths: list[Path]) -> Any:
    """Return the examples of files as lm-eval reads them."""
    import pyarrow
    from datasets import Dataset

    rows = [row for path in paths for row in _rows(path)]
    names = dict.fromkeys(name for row in rows for name in row)
    where = ", ".join(map(str, paths[:5]))
    if not rows:
        raise UserError(Problem("0 examples", KEY, where))
    try:  # `from_list` drops columns that the first example lacks
        return Dataset.from_list(
            [{name: row.get(name) for name in names} for row in rows], on_mixed_types="use_json"
        )
    except (pyarrow.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise UserError(Problem("examples of different types", KEY, where, str(error)[:200])) from error


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".csv":
        yield from _csv(path)
    elif path.suffix == ".txt":
        (row,) = read_file(path)
        yield from ({"text": line} for line in _value(row)["text"].splitlines())
    else:
        yield from map(_value, read_file(path))


def _value(row: Any) -> dict[str, Any]:
    if isinstance(row, BadRow):
        raise UserError(row.problem)
    return row.value


def _csv(path: Path) -> list[dict[str, Any]]:
    """Read a CSV file with pandas, which gives the same column types as `datasets`."""
    import pandas

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = pandas.read_csv(file)
    except (ValueError, OSError) as error:
        raise UserError(Problem("not valid CSV", KEY, str(path), str(error)[:200])) from error
    records = table.to_dict("records")
    return [{str(k): None if v != v else v for k, v in record.items()} for record in records]


def _of_the_hub(name: str, config: str | None, revision: str | None, **options: Any) -> dict[str, Any]:
    """Load all splits of a Hub dataset.

    Images are not allowed, because their decoder downloads from addresses.
    """
    splits = hub_datasets.load(name, config, revision, **options)
    for split, dataset in splits.items():
        for column, feature in dataset.features.items():
            if not _is_plain(feature):
                what, fix = f"the column {column} of {name} is not text or numbers", "another dataset"
                raise UserError(Problem(what, KEY, found=f"{split}: {type(feature).__name__}", fix=fix))
    return dict(splits)


def _is_plain(feature: Any) -> bool:
    from datasets import ClassLabel, Value
    from datasets.features import Json

    if isinstance(feature, dict | list):
        return all(map(_is_plain, feature.values() if isinstance(feature, dict) else feature))
    inner = getattr(feature, "feature", None)  # the type inside a list
    return isinstance(feature, Value | ClassLabel | Json) if inner is None else _is_plain(inner)
