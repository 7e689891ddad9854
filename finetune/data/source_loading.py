"""Which rows: the sources of a recipe, the files and datasets they name, and the validation set."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.folder_search import match_paths
from finetune.core.paths import can_be_path, local_path, similar_files
from finetune.core.regular_files import check_regular
from finetune.data import hints, hub_datasets, read_limits
from finetune.data.dataset_folders import as_name, choose_files, count_files
from finetune.data.examples import BadRow, Row
from finetune.data.formats import conversations, convert, detect, digest, of_another_format, unused
from finetune.data.readers import READERS, count_rows, read_file
from finetune.hub import client
from finetune.recipe.schema import Data, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.data.examples import Example
    from finetune.data.readers import Rows

MAX_SHOWN = 5
RUNS_CODE = (".py", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".npy")
FAR = 0.1  # of the validation examples that are asked for: such a difference is reported
LOOKED_AT = 1000  # entries of a folder without data, for a hint
COUNTED = 2**26  # bytes of a file whose rows are counted for a note


def sources(data: Data) -> list[Source]:
    """What `data.name` names, each with the revision, subset and split that hold for it."""
    named = [data.name] if isinstance(data.name, str) else data.name
    found = [Source(name=item) if isinstance(item, str) else item for item in named]
    defaults = {"revision": data.revision, "subset": data.subset, "split": data.split, **limits(data)}
    return [
        source.model_copy(update={key: getattr(source, key) or value for key, value in defaults.items()})
        for source in found
    ]


def limits(data: Data) -> dict[str, int | None]:
    """The limits of what is read at once, by a source's keys."""
    return {
        "max_example_bytes": data.max_example_bytes,
        "max_uncompressed_bytes": data.max_uncompressed_bytes,
    }


def validation_source(data: Data) -> Source:
    return Source(name=str(data.validation)).model_copy(update=limits(data))


def named(data: Data) -> list[tuple[Source, str]]:
    """What is trained on and held out, each with the key that names it."""
    named = [(source, "data.name") for source in sources(data)]
    return named + ([(validation_source(data), "data.validation")] if data.validation is not None else [])


def check_of_the_hub(data: Data) -> None:
    """Revision, subset and split choose rows of a Hub data set only; files have none (exit 2).

    A name that is no file must be one that a dataset of the Hub can have.
    """
    split = data.split if data.split != Data.model_fields["split"].default else None
    asked = {"data.revision": data.revision, "data.subset": data.subset, "data.split": split}
    items = data.name if isinstance(data.name, list) else [data.name]
    files_only = [files(source.name, "data.name") is not None for source in sources(data)]
    for source, is_file in zip(sources(data), files_only, strict=True):
        if not is_file:
            hub_datasets.check_name(source.name)
    wrong = [(key, value) for key, value in asked.items() if value and all(files_only)]
    for item, is_file in zip(items, files_only, strict=True):
        if isinstance(item, Source) and is_file:
            more = {"revision": item.revision, "subset": item.subset, "split": item.split}
            wrong += [("data.name", f"{key}: {value} of {item.name}") for key, value in more.items() if value]
    if wrong:
        what = "is for a Hub data set: files have no such parts"
        raise UserError(*(Problem(what, key, found=found, fix="drop it") for key, found in wrong))


def training(data: Data, source: Source, held_out: set[int], seed: int) -> Rows:
    """The rows of one source, less those that are held out.

    Raises:
        UserError: a file that is missing, empty or of a kind that is not read (exit 2).
    """
    return (row for row in read(source, "data.name") if not is_held_out(row, data, held_out, seed))


def is_held_out(row: Row | BadRow, data: Data, held_out: set[int], seed: int) -> bool:
    """Whether a row is one of those that `draw_held_out` drew."""
    return bool(held_out) and isinstance(row, Row) and digest(row, seed, data) in held_out


def validation(data: Data, held_out: set[int], seed: int) -> list[tuple[str, Rows]]:
    """The validation set by source: a file of its own, or a share of the training data."""
    if data.validation is not None:
        check_disjoint(data)
        return [(data.validation, read(validation_source(data), "data.validation"))]

    def chosen(source: Source) -> Rows:
        return (row for row in read(source, "data.name") if is_held_out(row, data, held_out, seed))

    return [(title(source), chosen(source)) for source in sources(data)] if held_out else []


def draw_held_out(data: Data, seed: int) -> set[int]:
    """Digests of the rows that `data.validation_fraction` holds out.

    Rows of equal content go together, and so do the rows of one conversation. A conversation that is much
    larger than the validation set stays in training. An id or a first turn of half of the rows is no
    conversation.
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
        # Rows without a column that is read are all alike: that is said first, of a named format too
        by_columns = data.model_copy(update={"format": "auto"})
        for source in sources(data):
            for row in islice((row for row in read(source, "data.name") if isinstance(row, Row)), 1):
                detect(row, by_columns)
        what, number = "no row would be left to train on", len(set(digests))
        found = f"{number} different row{'s' * (number != 1)}"
        raise UserError(Problem(what, "data.validation_fraction", found=found, fix=_one_text(data)))
    return drawn


def count_held_out(rows: int, fraction: float) -> int:
    """How many of so many rows `data.validation_fraction` asks for."""
    return max(1, round(rows * fraction))


def note_on_share(data: Data, rows: int, held_out: int) -> list[str]:
    """That the validation set is far from as large as asked, since rows of one conversation stay together.

    Args:
        rows: of the dataset.
        held_out: those of them in the validation set.
    """
    if data.validation_fraction is None:
        return []
    asked = count_held_out(rows, data.validation_fraction)
    if abs(held_out - asked) <= FAR * asked:
        return []
    why = "examples of one conversation or of equal content stay together"
    return [f"data.validation_fraction asks for {asked:,} validation examples, and {held_out:,} are: {why}"]


def _groups(owners: array[int], keys: array[int], many: int) -> dict[int, set[int]]:
    """Digest of a row -> those of its conversation, of rows that share a key with a row of other content.

    Args:
        keys: what tells conversations apart, of the row at the same place in `owners`.
        many: rows; what so many have in common is a prompt of the whole dataset, and no conversation.
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
    """The first digests, up to about so many rows, each with all of its conversation or not at all.

    The smallest conversation that does not fit is drawn too if that comes closer to the number.
    """
    rows, drawn, looked_at, total = Counter(digests), set[int](), set[int](), 0
    too_large: list[tuple[int, int]] = []  # rows of a conversation, one of its digests
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
    """What to do about a single text file, which has no share to hold out; else the empty string."""
    paths = [path for source in sources(data) for path in files(source.name, "data.name") or ()]
    if [path.suffix for path in paths] != [".txt"]:
        return ""
    instead = "data.validation: another file, or the text in several files"
    return f"a .txt file is one example, which can't be split: {instead}"


def fingerprints(data: Data, held_out: bool = False) -> dict[str, str]:
    """Each file -> the sha256 of its content; each Hub data set -> the commit that was asked for.

    Args:
        held_out: only of the files that the validation examples are read from.
    """
    found, read_from = {}, named(data)
    if held_out and (data.validation is not None or data.validation_fraction is None):
        read_from = [(source, key) for source, key in read_from if key == "data.validation"]
    for source, key in read_from:
        paths = files(source.name, key)
        if paths is None:
            found[hub_name(source)] = _commit(source)
        for path in paths or ():
            found[str(path.resolve())] = client.sha256(path)
    return found


def check_disjoint(data: Data) -> None:
    """The validation set must not be trained on: no file may be both (exit 2)."""
    if data.validation is None:
        return
    held_out = files(data.validation, "data.validation")
    if held_out is None:
        what, fix = "the validation set comes from a file", "a file, or data.validation_fraction"
        raise UserError(Problem(what, "data.validation", found=data.validation, fix=fix))
    trained = set()
    for source in sources(data):
        with contextlib.suppress(UserError):  # who reads them says what is missing; a moved run needs none
            trained |= {path.resolve() for path in files(source.name, "data.name") or ()}
    both = trained & {path.resolve() for path in held_out}
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
    in_a_folder = len(path.parts) > 1 and os.path.isdir(path.parts[0])  # data/trian, where there is a data/
    if not (local_path(name) or in_a_folder):
        return None
    if not can_be_path(str(path)):
        raise UserError(Problem("not the name of a file", key, found=name[:200]))
    matches = [path]
    if any(mark in name for mark in "*?[") and not os.path.exists(
        path
    ):  # notes[1].jsonl is a file's name too
        matches = match_paths(os.path.expanduser(name), Path(), key)
    missing = [entry for entry in matches if not os.path.exists(entry)]
    if missing or not matches:
        found = f"looked in {Path.cwd()} and beside the recipe"
        raise UserError(Problem(f"no such file: {name}", key, found=found, fix=similar_files(path)))
    paths = matches
    if all(map(os.path.isdir, matches)):
        paths = list(chain.from_iterable(choose_files(folder, key).read for folder in matches))
        if not paths:
            raise UserError(_nothing_to_read(path, key))
    for entry in paths:
        check_regular(entry, key)
        if entry.suffix not in READERS:
            runs_code = "; such a file can run code when it is opened" if entry.suffix in RUNS_CODE else ""
            expected, what = ", ".join(READERS), f"can't read {entry.name}{runs_code}"
            fix = hints.file(entry.suffix)
            raise UserError(Problem(what, key, found=entry.suffix, expected=expected, fix=fix))
    return paths


def _nothing_to_read(folder: Path, key: str) -> Problem:
    below = islice(folder.rglob("*"), LOOKED_AT) if folder.is_dir() else ()
    others = [path.name for path in sorted(below) if os.path.isfile(path)]
    fix = next((fix for name in others if (fix := hints.file(Path(name).suffix))), "")
    what, found = f"no {', '.join(READERS)} file in {folder}", ", ".join(others[:MAX_SHOWN])
    return Problem(what, key, found=found or "an empty folder", fix=fix)


def passed_by(data: Data) -> dict[str, list[str]]:
    """Each folder that is named -> what in it is no data by its name, and is not read."""
    found = {}
    for folder, key in _folders(data):
        chosen = choose_files(folder, key)
        data_files = [*chosen.read, *chain.from_iterable(chosen.others.values())]
        of_data = {
            parent for path in data_files for parent in path.parents
        }  # the notes on folders count them
        others = [
            entry.name + "/" * entry.is_dir()
            for entry in sorted(folder.iterdir())
            if entry.suffix not in (*READERS, ".md") and entry.name[0] != "." and entry not in of_data
        ]
        if others:
            found[str(folder)] = others
    return found


def notes_on_folders(data: Data) -> list[str]:
    """The data files in the folders of a recipe that it does not read: how many, and how to use them."""
    folders = [(folder, choose_files(folder, key)) for folder, key in _folders(data)]
    used = {path.resolve() for source, key in named(data) for path in files(source.name, key) or ()}
    notes, has_validation = [], data.validation is not None or data.validation_fraction is not None
    for folder, found in folders:
        others = {
            split: left
            for split, paths in found.others.items()
            if (left := [path for path in paths if path.resolve() not in used])
        }
        if not others:
            continue
        counts = [f"{split or 'no split'}: {_counted(paths)}" for split, paths in others.items()]
        note = f"{folder}: data files that are not read: {'; '.join(counts)}"
        if "validation" in others and not has_validation:
            note += f". To evaluate on them, set data.validation: {as_name(others['validation'])}"
        notes.append(note)
    return list(dict.fromkeys(notes))


def _folders(data: Data) -> list[tuple[Path, str]]:
    """Each folder that a recipe names, and the key that names it."""
    paths = [(Path(os.path.expanduser(source.name)), key) for source, key in named(data)]
    return [(path, key) for path, key in dict.fromkeys(paths) if os.path.isdir(path)]


def _counted(paths: list[Path]) -> str:
    """How many files and rows, where they can be counted in a moment."""
    names = ", ".join(path.name for path in paths[:MAX_SHOWN]) + " ..." * (len(paths) > MAX_SHOWN)
    said = f"{count_files(paths)} ({names})"
    columnar = (".parquet", ".arrow")
    if any(path.suffix not in columnar and path.stat().st_size > COUNTED for path in paths):
        return said
    with contextlib.suppress(UserError, KeyError):  # who reads such a file says what is wrong with it
        rows = sum(map(count_rows, paths))
        return f"{count_files(paths)} with {rows:,} example{'s' * (rows != 1)} ({names})"
    return said


def read(source: Source, key: str) -> Rows:
    """Every row of a source, in order."""
    paths = files(source.name, key)
    if paths is None:
        yield from _hub(source)
        return
    empty = True
    for path in paths:
        for row in read_file(path, read_limits.of_source(source)):
            empty = False
            yield row
    if empty:
        header = any(path.suffix == ".csv" and path.stat().st_size for path in paths)
        found = "of a csv file the first line names the columns" if header else ""
        raise UserError(Problem(f"0 rows in {', '.join(map(str, paths))}", key, found=found))


def examples(
    rows: Iterable[Row | BadRow],
    data: Data,
    name: str,
    formats: dict[str, str],
    left: dict[str, dict[str, int]],
) -> Iterator[Example | BadRow]:
    """Each row as an example, or as what is wrong with it.

    Args:
        name: of the source, whose first row decides on the format.
        formats: its format by its name, noted here.
        left: columns that are not used, and how many rows have something there, counted here.
    """
    for row in rows:
        if isinstance(row, BadRow):
            yield row
            continue
        if name not in formats:
            formats[name] = detect(row, data)
        counts = left.setdefault(name, {})
        for column in unused(row, data, formats[name]):
            counts[column] = counts.get(column, 0) + 1
        try:
            yield replace(convert(row, data, formats[name]), conversations=conversations(row, data))
        except BadRow as bad:
            yield of_another_format(bad, row, data, formats[name])


def hub_name(source: Source) -> str:
    """A Hub data set with its subset and split."""
    return " ".join(filter(None, (source.name, source.subset, source.split)))


def title(source: Source) -> str:
    """What a source is called: files by their name, a Hub data set also by what two of one may differ by."""
    return hub_name(source) if files(source.name, "data.name") is None else source.name


def _commit(source: Source) -> str:
    """The commit a Hub data set is at; without a network, what the recipe says of it."""
    from huggingface_hub import HfApi

    asked = source.revision or "main"
    if client.COMMIT.fullmatch(asked):
        return asked
    try:
        return HfApi().dataset_info(source.name, revision=asked).sha or asked
    except (
        Exception
    ):  # whatever keeps the Hub from answering (no network, offline, gated): loading says which
        return asked


def _hub(source: Source) -> Rows:
    from datasets.exceptions import DatasetsError

    try:
        dataset = hub_datasets.load(source.name, source.subset, _commit(source), split=source.split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise _not_loaded(source, error) from error
    from finetune.data.arrow_values import table_rows

    yield from table_rows(dataset.with_format("arrow").iter(batch_size=1000), source.name)


def _not_loaded(source: Source, error: Exception) -> UserError:
    """What keeps a Hub data set from being loaded: the network (exit 3), or what was asked for (exit 2)."""
    # `datasets` says of a row that it can't read only that there is one
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
    said = " ".join(str(cause).split())[:300]  # the choices stand on the lines after the first
    if isinstance(cause, OSError) or "Couldn't find cache" in said:
        code, fix = Exit.ENVIRONMENT, "check name, revision and network; without one: pin data.revision to a"
        fix += " commit, and prepare it elsewhere with finetune data RECIPE --prepare DIR"
    else:
        code, fix = Exit.INPUT, "subset and split as the data set has them, or files of it"
        if "scripts" in said:
            fix = "revision: refs/convert/parquet, where the Hub has made one; or files of it"
    what = "the data set can't be loaded from the Hub"
    return UserError(Problem(what, "data.name", found=f"{hub_name(source)}: {said}", fix=fix), code=code)
