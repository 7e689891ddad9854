"""Read a dataset of the Hub: choose the files of a split, download them, and read them as local files.

finetune chooses the files by the list of the repository's files and by its card. Neither `datasets` nor
fsspec sees the card, so no name in it becomes an address, a pattern of theirs or an option of a reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from finetune.core.errors import Exit, Problem, UserError
from finetune.data import dataset_cards, dataset_folders, read_limits
from finetune.data.examples import BadRow, Row
from finetune.data.read_limits import Limits
from finetune.data.readers import Rows, can_read, count_rows, kind, lines_of, read_file, renamed
from finetune.hub import client, dataset_repository
from finetune.hub.dataset_repository import Repository
from finetune.recipe.schema import Source

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
LONGEST_NAME = 193  # in characters: 96 each for owner and name, and a slash
# One part of `data.split`, such as train, train[:10%] or test[100:200]
PART = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<start>-?\d+%?)?:(?P<end>-?\d+%?)?\])?")
OTHER_FILES = "data.revision: refs/convert/parquet, or download the files and name them in data.name"
JSON = (".jsonl", ".json")
# Types of files; in case of a draw the first one counts
TYPES = (".parquet", ".arrow", *JSON, ".csv", ".txt", ".tar")
MANIFESTS = (dataset_folders.STATE, dataset_folders.DICT)
MOST_MANIFESTS, LARGEST = 100, 16 * 2**20  # of a repository; bytes of each
CHOOSE = "set data.subset and data.split to a subset and a split of the dataset"


class Part(NamedTuple):
    """A part of a split: its files, and the range of their rows that is read."""

    files: dict[str, Path]
    """Path in the repository: path on this machine."""
    rows: slice


def rows(source: Source, key: str = "data.name") -> Rows:
    """Yield the rows of a dataset, in order. The place of a row names the file in the repository.

    Raises:
        UserError: the name is not valid, the dataset has no such subset or split, or finetune can't read a
            file (exit 2). The Hub can't be reached, or gives an odd answer (exit 3).
    """
    limits = read_limits.of_source(source)
    for part in parts(source, key):
        found = (renamed(_rows(path, limits), str(path), name) for name, path in part.files.items())
        yield from islice(chain.from_iterable(found), part.rows.start, part.rows.stop)


def _rows(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a file. Each line of a text file is a row, as for `datasets`."""
    if kind(path) != ".txt":
        yield from read_file(path, limits)
        return
    for number, line in enumerate(lines_of(path, limits), start=1):
        try:
            yield Row({"text": line.decode().rstrip("\r\n")}, f"{path}:{number}")
        except UnicodeDecodeError as error:
            yield BadRow("unreadable", "the line is not UTF-8", f"{path}:{number}", str(error))


def _count(path: Path, limits: Limits) -> int:
    """Return the number of rows of a file."""
    return sum(1 for _ in _rows(path, limits)) if kind(path) == ".txt" else count_rows(path, limits)


def parts(source: Source, key: str = "data.name") -> list[Part]:
    """Download the files of a split, and return them for each part of it, such as `train+test[:100]`."""
    asked = [PART.fullmatch(part.strip()) for part in (source.split or "train").split("+")]
    if not all(asked):
        raise UserError(_no_split(str(source.split)))
    return [_part(source, key, match) for match in asked if match]


def _part(source: Source, key: str, asked: re.Match[str]) -> Part:
    def choose(folder: Path) -> list[Path]:
        chosen = dataset_folders.choose_files(folder, key, asked["name"], source.subset, on_hub=True)
        _name_ignored(chosen, folder, source.name)
        return chosen.read

    paths = _downloaded(source.name, source.revision, key, lambda folder: {"": choose(folder)})[""]
    files = {f"{source.name}/{name}": path for name, path in paths.items()}
    if not files or not all(map(can_read, files.values())):
        found = ", ".join(files)[:200] or "no file that finetune can read"
        raise UserError(_not_loaded(source.name, key, found, OTHER_FILES))
    if asked["start"] is None and asked["end"] is None:
        return Part(files, slice(0, None))
    from datasets import ReadInstruction

    number = sum(_count(path, read_limits.of_source(source)) for path in files.values())
    try:
        part = asked[0].removeprefix(asked["name"])  # the name of a split of a card may have a hyphen
        (found,) = ReadInstruction.from_spec(f"rows{part}").to_absolute({"rows": number})
    except (ValueError, AssertionError):  # such as 200%
        raise UserError(_no_split(asked[0])) from None
    return Part(files, slice(found.from_ or 0, number if found.to is None else found.to))


def _name_ignored(chosen: dataset_folders.FolderFiles, folder: Path, name: str) -> None:
    """Print a note on data files that belong to no split, because `datasets` does not read them either."""
    others = [os.path.relpath(path, folder) for path in chosen.others.get(dataset_folders.BELOW, [])]
    if others:
        shown = ", ".join(others[:5]) + " ..." * (len(others) > 5)
        dataset_repository.say_once(f"finetune ignores files of {name} that belong to no split: {shown}")


def _no_split(found: str) -> Problem:
    return Problem(
        "this is not a split",
        "data.split",
        found=found[:200],
        expected="a name, such as train, train[:10%] or train[:1000]+test",
        fix="data.split: train",
        code="data-not-found",
    )


def splits(
    name: str, key: str, choose: Callable[[Path], dataset_folders.Splits], revision: str | None = None
) -> dict[str, list[Path]]:
    """Download the files that `choose` returns for an outline of the repository, and return them by split.

    Raises:
        UserError: as `rows`.
    """
    found = _downloaded(name, revision, key, choose)
    return {split: list(paths.values()) for split, paths in found.items()}


def _downloaded(
    name: str, revision: str | None, key: str, choose: Callable[[Path], dataset_folders.Splits]
) -> dict[str, dict[str, Path]]:
    """Return the local path of each chosen file, by split and by its path in the repository."""
    check_name(name, key)
    try:
        repository = dataset_repository.read(name, revision)
        with _outline(repository) as folder:
            try:
                chosen = {
                    split: [os.path.relpath(path, folder) for path in _of_one_type(paths, folder, name)]
                    for split, paths in choose(folder).items()
                }
            except UserError as error:
                raise _of_the_repository(error, folder, name) from None
        outside = {path for paths in chosen.values() for path in paths} - repository.files.keys()
        if outside:
            raise UserError(
                _not_loaded(name, key, f"files outside of its repository: {min(outside)}", CHOOSE)
            )
        return {split: dataset_repository.download_all(repository, paths) for split, paths in chosen.items()}
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the Hub's library does not check the types in the Hub's answers
        raise _unreachable(name, key, error) from error


def _of_one_type(paths: list[Path], folder: Path, name: str) -> list[Path]:
    """Return the files of the most common type. As for `datasets`, others such as LICENSE.txt are no data."""
    counts = Counter(kind(path) for path in paths)
    if len(counts) < 2:
        return paths
    most = max(counts, key=lambda suffix: (counts[suffix], suffix in TYPES and -TYPES.index(suffix)))
    kept = JSON if most in JSON else (most,)
    others = [os.path.relpath(path, folder) for path in paths if kind(path) not in kept]
    if others:
        shown = ", ".join(others[:5]) + " ..." * (len(others) > 5)
        dataset_repository.say_once(f"finetune ignores files of {name} that are not {most}: {shown}")
    return [path for path in paths if kind(path) in kept]


@contextlib.contextmanager
def _outline(repository: Repository) -> Iterator[Path]:
    """A temporary folder with the names of a repository's data files, and with its cards and manifests.

    The data files are empty. Their names and the cards decide which of them are read.
    """
    with tempfile.TemporaryDirectory(prefix="finetune-") as made:
        root = Path(made)
        read = [
            name for name in repository.files if name in dataset_cards.CARDS or Path(name).name in MANIFESTS
        ]
        if len(read) > MOST_MANIFESTS or max((repository.files[name] for name in read), default=0) > LARGEST:
            what = f"at most {MOST_MANIFESTS} cards and manifests, of at most {LARGEST:,} bytes, are read"
            raise UserError(_not_loaded(repository.name, "data.name", what, OTHER_FILES))
        for name in read:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(dataset_repository.download(repository, name), root / name)
        for name in repository.files:
            path = root / name
            if path.name == dataset_folders.INFO or dataset_folders.has_data_suffix(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        yield root


def _of_the_repository(error: UserError, folder: Path, name: str) -> UserError:
    """Return an error of the outline with the name of the dataset in place of the temporary folder."""

    def said(text: str) -> str:
        return text.replace(f"{folder}{os.sep}", f"{name}/").replace(str(folder), name)

    problems = (
        replace(
            one,
            what=said(one.what),
            where=said(one.where),
            found=said(one.found),
            why=said(one.why),
            fix=CHOOSE if str(folder) in one.fix else one.fix,
        )
        for one in error.problems
    )
    return UserError(*problems, code=error.code)


def commit(source: Source, key: str = "data.name") -> str:
    """Return the commit that `rows` reads.

    Raises:
        UserError: as `rows`.
    """
    check_name(source.name, key)
    found = client.dataset_commit(source.name, source.revision or "main")
    if client.COMMIT.fullmatch(found):
        return found
    try:
        return dataset_repository.read(source.name, source.revision).commit
    except (UserError, MemoryError):
        raise
    except Exception as error:  # as in `_downloaded`
        raise _unreachable(source.name, key, error) from error


def _unreachable(name: str, key: str, error: Exception) -> UserError:
    """Return the error for a dataset that can't be listed or downloaded (exit 3)."""
    said = " ".join(str(error).split())[:300]  # the following lines list the choices
    fix = "check the name, the revision and the network. Without a network: set data.revision to a commit,"
    fix += " and run finetune data RECIPE --prepare DIR elsewhere"
    return UserError(_not_loaded(name, key, said, fix), code=Exit.ENVIRONMENT)


def _not_loaded(name: str, key: str, found: str, fix: str) -> Problem:
    return Problem(
        "finetune can't load the dataset from the Hub", key, found=f"{name}: {found}", fix=fix, code="hub"
    )


def check_name(name: str, key: str = "data.name", where: str = "") -> None:
    """Raise a UserError for names of readers in `datasets`, addresses and storage buckets (exit 2)."""
    if name in packaged_readers():  # `datasets` would read the files of the working directory
        raise UserError(
            Problem(
                f"{name} is a reader of `datasets`, not a dataset",
                key,
                where=where,
                found=name,
                expected="a file, a folder or a Hub id",
                fix="name a file, such as data/train.jsonl",
                code="data-not-found",
            )
        )
    if not NAME.fullmatch(name) or ".." in name or len(name) > LONGEST_NAME or name.startswith("buckets/"):
        raise UserError(
            Problem(
                "this is not the id of a dataset on the Hub",
                key,
                where=where,
                found=name[:200],
                expected="an id such as owner/name",
                fix="name a file, such as data/train.jsonl, or a Hub id such as owner/name",
                code="data-not-found",
            )
        )


@cache
def packaged_readers() -> frozenset[str]:
    """Return the names of the readers in `datasets` without importing it."""
    spec = find_spec("datasets")
    places = (spec.submodule_search_locations if spec else None) or ()
    folders = [folder for place in places for folder in Path(place, "packaged_modules").iterdir()]
    return frozenset(folder.name for folder in folders if folder.is_dir())
