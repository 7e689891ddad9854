"""Select the examples of a run: sources, their files and datasets, and the validation set."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.folder_search import match_paths, walk
from finetune.core.paths import can_be_path, is_utf8, local_path, similar_files
from finetune.core.regular_files import check_regular
from finetune.data import hints, hub_datasets, read_limits
from finetune.data.dataset_folders import as_name, choose_files, count_files, missing_shards, without_runs
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import conversations, convert, detect, digest, of_another_format, unused
from finetune.data.readers import SUFFIXES, Rows, can_read, count_rows, read_file
from finetune.hub import client
from finetune.recipe.schema import Data, Source

MAX_SHOWN = 5
RUNS_CODE = (".py", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy")
FAR = 0.1  # a larger relative difference from the requested size gives a note
MOST_SOURCES = 200  # of one recipe
LOOKED_AT = 1000  # entries of a folder without data that are searched for a hint
# Unused columns of a source that are counted by name, and the characters of a name
MOST_COLUMNS, LONGEST_COLUMN, OTHER_COLUMNS = 100, 100, "other columns"
MOST_FILES, LONGEST_NAMES = 20_000, 8 * 2**20  # of all sources: files, and characters of their paths
State = tuple[int, int, int]  # of a file; see `state_of`
NO_STATE = -1, -1, -1  # of a file that does not exist
COUNTED = 2**26  # bytes; the examples of larger files are not counted for a note


def sources(data: Data) -> list[Source]:
    """Return the sources in `data.name`, each with the revision, subset and split that apply to it.

    Raises:
        UserError: there are too many (exit 2).
    """
    named = [data.name] if isinstance(data.name, str) else data.name
    if len(named) > MOST_SOURCES:
        raise UserError(
            Problem(
                "the recipe names too many sources of data",
                "data.name",
                found=f"{len(named):,}",
                expected=f"at most {MOST_SOURCES}",
                fix="name a folder, or a pattern such as data/*.jsonl",
                code="data-size",
            )
        )
    found = [Source(name=item) if isinstance(item, str) else item for item in named]
    defaults = {"revision": data.revision, "subset": data.subset, "split": data.split, **limits(data)}
    return [
        source.model_copy(update={key: getattr(source, key) or value for key, value in defaults.items()})
        for source in found
    ]


def limits(data: Data) -> dict[str, int | None]:
    """Return the read limits of the section, by the keys of a source."""
    return {
        "max_example_bytes": data.max_example_bytes,
        "max_uncompressed_bytes": data.max_uncompressed_bytes,
    }


def validation_source(data: Data) -> Source:
    return Source(name=str(data.validation)).model_copy(update=limits(data))


def named(data: Data) -> list[tuple[Source, str]]:
    """Return the training and validation sources, each with the recipe key that names it."""
    named = [(source, "data.name") for source in sources(data)]
    return named + ([(validation_source(data), "data.validation")] if data.validation is not None else [])


def check_of_the_hub(data: Data) -> None:
    """Check that revision and subset are used only with a Hub dataset, and check dataset names.

    A split is for a Hub dataset or a folder.

    Raises:
        UserError: all sources are files, or a name is not valid on the Hub (exit 2).
    """
    has_folder = any(os.path.isdir(os.path.expanduser(source.name)) for source in sources(data))
    split = data.split if data.split != Data.model_fields["split"].default and not has_folder else None
    hub_keys = {"data.revision": data.revision, "data.subset": data.subset, "data.split": split}
    items = data.name if isinstance(data.name, list) else [data.name]
    files_only = [files_of(source, "data.name") is not None for source in sources(data)]
    for source, is_file in zip(sources(data), files_only, strict=True):
        if not is_file:
            hub_datasets.check_name(source.name)
    wrong = [(key, value) for key, value in hub_keys.items() if value and all(files_only)]
    for item, is_file in zip(items, files_only, strict=True):
        if isinstance(item, Source) and is_file:
            more = {
                "revision": item.revision,
                "subset": item.subset,
                "split": None if os.path.isdir(os.path.expanduser(item.name)) else item.split,
            }
            wrong += [("data.name", f"{key}: {value} of {item.name}") for key, value in more.items() if value]
    if wrong:
        or_folder, fix = " or a split of a folder", "remove `{}`"
        raise UserError(
            *(
                Problem(
                    "this key is only for a dataset on the Hub"
                    + or_folder * (key.endswith("split") or found.startswith("split:")),
                    key,
                    found=found,
                    fix=fix.format(found.partition(":")[0] if key == "data.name" else key.rpartition(".")[2]),
                    code="recipe-conflict",
                )
                for key, found in wrong
            )
        )


def training(data: Data, source: Source, held_out: set[int], seed: int) -> Rows:
    """Return the rows of one source without its validation rows.

    Raises:
        UserError: a file is missing, empty or of an unsupported type (exit 2).
    """
    return (row for row in read(source, "data.name") if not is_held_out(row, data, held_out, seed))


def is_held_out(row: Row | BadRow, data: Data, held_out: set[int], seed: int) -> bool:
    """Return whether `draw_held_out` selected a row for validation."""
    return bool(held_out) and isinstance(row, Row) and digest(row, seed, data) in held_out


def validation(data: Data, held_out: set[int], seed: int) -> list[tuple[str, Rows]]:
    """Return the validation rows by source: a separate file, or a share of the training data."""
    if data.validation is not None:
        check_disjoint(data)
        return [(data.validation, read(validation_source(data), "data.validation"))]

    def chosen(source: Source) -> Rows:
        return (row for row in read(source, "data.name") if is_held_out(row, data, held_out, seed))

    return [(title(source), chosen(source)) for source in sources(data)] if held_out else []


def draw_held_out(data: Data, seed: int) -> set[int]:
    """Select validation rows for `data.validation_fraction`, and return their digests.

    Rows with equal content stay together, and rows of one conversation stay together. A conversation that is
    much larger than the validation set stays in training. An id or first turn that half of the rows share
    does not count as a conversation.
    """
    if data.validation_fraction is None:
        return set()
    digests, owners, keys = array("Q"), array("Q"), array("Q")
    for row in chain.from_iterable(read(source, "data.name") for source in sources(data)):
        if isinstance(row, Row):
            digests.append(digest(row, seed, data))
            for key in conversations(row, data):
                owners.append(digests[-1])
                keys.append(key)
    digests = sorted(digests)
    count = count_held_out(len(digests), data.validation_fraction)
    groups = _groups(owners, keys, len(digests) // 2)
    drawn = (_draw_whole(digests, groups, count) if groups else set()) or set(digests[:count])
    if digests and len(drawn) == len(set(digests)):
        # Rows look equal if they lack the columns that are read. Report the missing columns first.
        by_columns = data.model_copy(update={"format": "auto"})
        for source in sources(data):
            for row in islice((row for row in read(source, "data.name") if isinstance(row, Row)), 1):
                detect(row, by_columns)
        what, number = "the validation set would take all examples", len(set(digests))
        raise UserError(
            Problem(
                what,
                "data.validation_fraction",
                found=f"{number} different example{'s' * (number != 1)}",
                fix=_one_text(data),
                code="data-empty",
            )
        )
    return drawn


def count_held_out(rows: int, fraction: float) -> int:
    """Return the number of rows that `data.validation_fraction` requests."""
    return max(1, round(rows * fraction))


def note_on_share(data: Data, rows: int, held_out: int) -> list[str]:
    """Return a note if the size of the validation set differs much from the requested size.

    Args:
        rows: number of examples in the dataset.
        held_out: number of them in the validation set.
    """
    if data.validation_fraction is None:
        return []
    validation_count = count_held_out(rows, data.validation_fraction)
    if abs(held_out - validation_count) <= FAR * validation_count:
        return []
    why = "examples of one conversation or of equal content stay together"
    said = f"the validation set has {held_out:,} examples in place of {validation_count:,}"
    return [f"data.validation_fraction: {said}, because {why}"]


def _groups(owners: array[int], keys: array[int], many: int) -> dict[int, set[int]]:
    """Map the digest of each row to the digests of its conversation.

    Only rows that share a key with a row of other content are included.

    Args:
        owners: digests of rows, one for each key.
        keys: hashes that identify conversations.
        many: a key of this many rows is a common prompt of the dataset, not a conversation.
    """
    import numpy as np

    _, inverse, counts = np.unique(np.frombuffer(keys, np.uint64), return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    order = order[counts[inverse[order]] < many]
    sorted_keys, sorted_owners = (
        np.frombuffer(keys, np.uint64)[order],
        np.frombuffer(owners, np.uint64)[order],
    )
    shared = (sorted_keys[1:] == sorted_keys[:-1]) & (sorted_owners[1:] != sorted_owners[:-1])
    groups: dict[int, set[int]] = {}
    for one, other in zip(
        sorted_owners[:-1][shared].tolist(), sorted_owners[1:][shared].tolist(), strict=True
    ):
        if one in groups and groups[one] is groups.get(other):
            continue
        large, small = sorted((groups.get(one, {one}), groups.get(other, {other})), key=len, reverse=True)
        large |= small
        groups |= dict.fromkeys((*small, one, other), large)
    return groups


def _draw_whole(digests: list[int], groups: dict[int, set[int]], count: int) -> set[int]:
    """Select the first digests, up to about `count` rows.

    A conversation is selected completely or not at all.

    The smallest conversation that does not fit is also selected if the total then is closer to `count`.
    """
    rows, drawn, looked_at, total = Counter(digests), set[int](), set[int](), 0
    too_large: list[tuple[int, int]] = []  # (number of rows of a conversation, one of its digests)
    for one in digests:
        if total >= count:
            break
        if one not in looked_at:
            group = groups.get(one, {one})
            looked_at |= group
            size = sum(rows[other] for other in group)
            if total + size <= count:
                drawn |= group
                total += size
            else:
                too_large.append((size, one))
    size, one = min(too_large, default=(0, 0))
    if size and abs(total + size - count) < count - total:
        drawn |= groups.get(one, {one})
    return drawn


def _one_text(data: Data) -> str:
    """Return advice if the only source is a text file, which is one example.

    Otherwise return an empty string.
    """
    paths = [path for source in sources(data) for path in files_of(source, "data.name") or ()]
    if [path.suffix for path in paths] != [".txt"]:
        return ""
    return "set data.validation to another file, because a .txt file is one example and can't be split"


def fingerprints(data: Data, held_out: bool = False) -> dict[str, str]:
    """Map each file to the sha256 of its content, and each Hub dataset to its commit.

    Args:
        held_out: include only the files that validation examples are read from.
    """
    found = {}
    for source, key in _read_from(data, held_out):
        paths = files_of(source, key)
        if paths is None:
            found[hub_name(source)] = hub_content(source)
        for path in paths or ():
            found[str(path.resolve())] = client.sha256(path)
    return found


def _read_from(data: Data, held_out: bool) -> list[tuple[Source, str]]:
    """Return the sources with their keys, or only the sources of validation examples."""
    if held_out and (data.validation is not None or data.validation_fraction is None):
        return [(source, key) for source, key in named(data) if key == "data.validation"]
    return named(data)


def file_states(data: Data, held_out: bool = False) -> dict[str, State]:
    """Map each local file of the data to its `state_of`.

    Args:
        held_out: include only the files that validation examples are read from.
    """
    paths = [path for source, key in _read_from(data, held_out) for path in files_of(source, key) or ()]
    return {str(path): state_of(path) for path in paths}


def state_of(path: str | Path) -> State:
    """Return the size of a file in bytes and the times of its last changes, or NO_STATE.

    Copies can keep the modification time of another file. The time of the last status change is always new.
    """
    try:
        found = os.stat(path)
    except OSError:
        return NO_STATE
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_unchanged(before: dict[str, State], after: dict[str, State]) -> None:
    """Check that no other program has written to the data between two calls of `file_states`.

    Otherwise the hash of a file may not belong to the examples that were read from it.

    Raises:
        UserError: a file has another size or time, is new, or is gone (exit 2).
    """
    raise_if_any(
        Problem(
            "the data changed while finetune read it",
            "data.name",
            where=path,
            fix="run the command again when no other program writes to the data",
            code="data-changed",
        )
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    )


def check_disjoint(data: Data) -> None:
    """Raise a UserError if a file is used for both training and validation (exit 2)."""
    if data.validation is None:
        return
    held_out = files(data.validation, "data.validation")
    if held_out is None:
        raise UserError(
            Problem(
                "the validation set must be a local file",
                "data.validation",
                found=data.validation,
                expected="a file or a folder",
                fix="data.validation_fraction: 0.1, and remove `validation`",
                code="data-not-found",
            )
        )
    trained = set()
    for source in sources(data):
        # Reading the sources reports missing files. A run folder that was moved does not need them.
        with contextlib.suppress(UserError):
            trained |= {path.resolve() for path in files_of(source, "data.name") or ()}
    both = trained & {path.resolve() for path in held_out}
    if both:
        raise UserError(
            Problem(
                "a file is in the training set and in the validation set",
                "data.validation",
                found=", ".join(map(str, sorted(both))),
                fix="list the training files one by one in data.name",
                code="recipe-conflict",
            )
        )


def files_of(source: Source, key: str) -> list[Path] | None:
    """Return the local files of a source, or `None` for a dataset on the Hub. See `files`."""
    listed, named = _LISTED.get(), (source.name, key, source.split)
    if listed is None:
        return files(*named)
    if named not in listed:
        listed[named] = files(*named)
    return listed[named]


_LISTED: ContextVar[dict[tuple[str, str, str | None], list[Path] | None] | None] = ContextVar(
    "listed", default=None
)


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """Search the folders of each source once within the block, because a check asks several times."""
    before = _LISTED.set({}) if _LISTED.get() is None else None
    try:
        yield
    finally:
        if before:
            _LISTED.reset(before)


def check_number_of_files(data: Data) -> None:
    """Refuse sources with too many files, of which each is recorded in the run folder (exit 2)."""
    count = size = 0
    for source, key in named(data):
        found: list[Path] = []
        with contextlib.suppress(UserError):  # the other checks report it
            found = (files_of(source, key) if source.name else None) or []
        count, size = count + len(found), size + sum(len(str(path)) for path in found)
        if count > MOST_FILES or size > LONGEST_NAMES:
            raise UserError(
                Problem(
                    "the sources of the data have too many files together",
                    key,
                    found=f"{count:,} files up to {source.name}, with {size:,} characters in their paths",
                    expected=f"at most {MOST_FILES:,} files, with {LONGEST_NAMES:,} characters",
                    fix="join the files, or name a folder once",
                    code="data-size",
                )
            )


def files(name: str, key: str, split: str | None = None) -> list[Path] | None:
    """Return the local files that a name refers to, or `None` for a Hub id.

    Args:
        split: the split of a folder. `None`: by the recipe key.

    Raises:
        UserError: the path does not exist, or finetune cannot read the file type (exit 2).
    """
    path = Path(os.path.expanduser(name))
    # A typo such as data/trian, if the folder data/ exists
    in_a_folder = len(path.parts) > 1 and os.path.isdir(path.parts[0])
    if not (local_path(name) or in_a_folder):
        return None
    if not can_be_path(str(path)):
        raise UserError(
            Problem(
                "this text can't be a path",
                key,
                found=name[:200],
                fix="name a file, such as data/train.jsonl",
                code="data-not-found",
            )
        )
    matches = [path]
    if any(mark in name for mark in "*?[") and not os.path.exists(
        path
    ):  # a file can have a name such as notes[1].jsonl
        matches = without_runs(match_paths(os.path.expanduser(name), Path(), key), os.path.expanduser(name))
    missing = [entry for entry in matches if not os.path.exists(entry)]
    if missing or not matches:
        near = similar_files(path)
        raise UserError(
            Problem(
                f"the file {name} does not exist",
                key,
                found=f"looked in {Path.cwd()} and in the recipe's folder",
                fix=f"{key}: {near}" if near else "correct the path; it starts at one of these folders",
                code="data-not-found",
            )
        )
    paths = matches
    if all(map(os.path.isdir, matches)):
        paths = list(chain.from_iterable(choose_files(folder, key, split).read for folder in matches))
        if not paths:
            raise UserError(_nothing_to_read(path, key))
    for entry in paths:
        check_regular(entry, key)
        if not is_utf8(entry):
            raise UserError(
                Problem(
                    "the name of the file is not UTF-8",
                    key,
                    found=str(entry),
                    fix="rename the file",
                    code="data-not-found",
                )
            )
        if not can_read(entry):
            raise UserError(
                Problem(
                    f"finetune can't read the type of {entry.name}",
                    key,
                    found=entry.suffix,
                    expected=SUFFIXES,
                    fix=hints.file(entry.suffix),
                    why="such a file can run code when it is opened" if entry.suffix in RUNS_CODE else "",
                    code="data-format",
                )
            )
    return paths


def _nothing_to_read(folder: Path, key: str) -> Problem:
    below = islice(walk(folder), LOOKED_AT) if folder.is_dir() else ()
    others = [path.name for path in sorted(below) if os.path.isfile(path)]
    return Problem(
        f"the folder {folder} has no data file",
        key,
        found=", ".join(others[:MAX_SHOWN]) or "an empty folder",
        expected=SUFFIXES,
        fix=next((fix for name in others if (fix := hints.file(Path(name).suffix))), ""),
        code="data-not-found",
    )


def passed_by(data: Data) -> dict[str, list[str]]:
    """Return the entries of each named folder that are not data files, so that nothing reads them."""
    found = {}
    for folder, key, split in _folders(data):
        chosen = choose_files(folder, key, split)
        data_files = [*chosen.read, *chain.from_iterable(chosen.others.values())]
        of_data = {
            parent for path in data_files for parent in path.parents
        }  # `notes_on_folders` reports these folders
        others = [
            entry.name + "/" * entry.is_dir()
            for entry in sorted(folder.iterdir())
            if not can_read(entry) and entry.suffix != ".md" and entry.name[0] != "." and entry not in of_data
        ]
        if others:
            found[str(folder)] = others
    return found


def notes_on_folders(data: Data) -> list[str]:
    """Return notes on data files in the recipe's folders that are not read, and how to use them."""
    folders = [(folder, choose_files(folder, key, split)) for folder, key, split in _folders(data)]
    used = {path.resolve() for source, key in named(data) for path in files_of(source, key) or ()}
    notes, has_validation = [], data.validation is not None or data.validation_fraction is not None
    for folder, found in folders:
        if missing := missing_shards(found.read):
            names = ", ".join(path.name for path in missing[:MAX_SHOWN]) + " ..." * (len(missing) > MAX_SHOWN)
            notes.append(f"by the names of its files, {folder} lacks {count_files(missing)}: {names}")
        others = {
            split: left
            for split, paths in found.others.items()
            if (left := [path for path in paths if path.resolve() not in used])
        }
        if not others:
            continue
        counts = [f"{split or 'no split'}: {_counted(paths)}" for split, paths in others.items()]
        note = f"finetune ignores these data files of {folder}: {'; '.join(counts)}"
        if "validation" in others and not has_validation:
            note += f". To evaluate on them, set data.validation: {as_name(others['validation'])}"
        notes.append(note)
    return list(dict.fromkeys(notes))


def _folders(data: Data) -> list[tuple[Path, str, str | None]]:
    """Return each folder that a recipe names, with its key and split."""
    paths = [(Path(os.path.expanduser(source.name)), key, source.split) for source, key in named(data)]
    return [(path, key, split) for path, key, split in dict.fromkeys(paths) if os.path.isdir(path)]


def _counted(paths: list[Path]) -> str:
    """Describe files by their number and, if counting takes only a moment, by their examples."""
    names = ", ".join(path.name for path in paths[:MAX_SHOWN]) + " ..." * (len(paths) > MAX_SHOWN)
    said = f"{count_files(paths)} ({names})"
    columnar = (".parquet", ".arrow")
    if any(path.suffix not in columnar and path.stat().st_size > COUNTED for path in paths):
        return said
    with contextlib.suppress(UserError, KeyError):  # reading such a file reports the error
        rows = sum(map(count_rows, paths))
        return f"{count_files(paths)} with {rows:,} example{'s' * (rows != 1)} ({names})"
    return said


def read(source: Source, key: str) -> Rows:
    """Yield every row of a source, in order."""
    paths = files_of(source, key)
    if paths is None:
        yield from hub_datasets.rows(source, key)
        return
    empty = True
    for path in paths:
        for row in read_file(path, read_limits.of_source(source)):
            empty = False
            yield row
    if empty:
        header = any(path.suffix == ".csv" and path.stat().st_size for path in paths)
        raise UserError(
            Problem(
                "the data has no example",
                key,
                found=", ".join(map(str, paths)),
                why="the first line of a csv file names the columns" if header else "",
                fix="add examples to the file, or name another file",
                code="data-empty",
            )
        )


def examples(
    rows: Iterable[Row | BadRow],
    data: Data,
    name: str,
    formats: dict[str, str],
    left: dict[str, dict[str, int]],
) -> Iterator[Example | BadRow]:
    """Convert each row to an example, or to the error that says what is wrong with it.

    Args:
        name: the source. Its first row decides its format.
        formats: maps each source to its format. The function adds this source.
        left: maps each source to its unused columns and their number of examples. The function adds to it.
    """
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        if name not in formats:
            formats[name] = detect(row, data)
        counts = left.setdefault(name, {})
        for column in {_column(column, counts) for column in unused(row, data, formats[name])}:
            counts[column] = counts.get(column, 0) + 1
        try:
            yield replace(convert(row, data, formats[name]), conversations=conversations(row, data))
        except BadRow as bad:
            yield of_another_format(bad, row, data, formats[name])


def _column(column: str, counts: dict[str, int]) -> str:
    """Return the name under which an unused column is counted: a part of a long name, or one for the rest."""
    name = column if len(column) <= LONGEST_COLUMN else f"{column[:LONGEST_COLUMN]}..."
    return name if name in counts or len(counts) < MOST_COLUMNS else OTHER_COLUMNS


def hub_name(source: Source) -> str:
    """Return the name of a Hub dataset with its subset, split and revision, which identifies it."""
    return " ".join(filter(None, (source.name, source.subset, source.split, source.revision)))


def title(source: Source) -> str:
    """Return the name of a source. For a Hub dataset it is `hub_name`.

    For a folder, it includes a split other than the training split.
    """
    if files_of(source, "data.name") is None:
        return hub_name(source)
    default = Data.model_fields["split"].default
    return source.name if source.split in (None, default) else f"{source.name} {source.split}"


def hub_content(source: Source) -> str:
    """Return the commit of a Hub dataset that `read` reads."""
    return hub_datasets.commit(source)
