"""Search folders that may hold anything: links that lead in circles, too many files, folders of others."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path, PurePosixPath

from finetune.core.errors import Problem, UserError

MOST_PARTS = 100  # of a pattern
MOST_LEVELS = 100  # of nested folders
MOST_ENTRIES = 20_000  # files and folders that one search looks at


class Search:
    """One search, which ends with an error where folders hold more than finetune looks at.

    Args:
        key: of the recipe, for errors.
        most: the number of files and folders that the search may look at. Each pattern counts as one.
    """

    def __init__(self, key: str, most: int = MOST_ENTRIES) -> None:
        self.key, self.left, self.most = key, most, most
        self.seen: set[tuple[int, int]] = set()  # devices and inodes, because links may lead to one folder

    def is_new(self, folder: Path) -> bool:
        """Whether this search has not read the folder before."""
        found = os.stat(folder)
        is_new = (found.st_dev, found.st_ino) not in self.seen
        self.seen.add((found.st_dev, found.st_ino))
        return is_new

    def entries(self, folder: Path) -> list[Path]:
        """Return the entries of a folder. Links to folders come last.

        Raises:
            UserError: it can't be read, or there is too much to look at (exit 2).
        """
        try:
            with os.scandir(folder) as listed:
                entries = list(islice(listed, self.left + 1))
        except OSError as error:
            raise UserError(
                Problem(
                    "finetune can't read this folder",
                    self.key,
                    where=str(folder),
                    found=error.strerror or "",
                    fix=f"chmod +rx {folder}",
                    code="path",
                )
            ) from error
        self.spend(len(entries), folder)
        entries.sort(key=lambda entry: (entry.is_symlink() and os.path.isdir(entry.path), entry.name))
        return [folder / entry.name for entry in entries]

    def spend(self, count: int, folder: Path) -> None:
        """Count what the search has looked at, and stop if it is too much (exit 2)."""
        self.left -= count
        if self.left < 0:
            raise UserError(
                Problem(
                    "the folder has too many entries",
                    self.key,
                    where=str(folder),
                    expected=f"at most {self.most:,} files and folders",
                    fix=f"set `{self.key}` to a folder with only the data",
                    code="data-size",
                )
            )


def match_paths(pattern: str, base: Path, key: str = "data.name", search: Search | None = None) -> list[Path]:
    """The paths that a pattern names, in order; of links, `**` reads the folder that they lead to once.

    Args:
        search: one search for several patterns; `None` begins a new one.

    Raises:
        UserError: there is too much to look through (exit 2).
    """
    paths, search = [base], search or Search(key)
    search.spend(1, base)
    parts = PurePosixPath(pattern).parts
    if len(parts) > MOST_PARTS:
        raise UserError(
            Problem(
                "the pattern has too many parts",
                key,
                found=f"{len(parts):,}",
                expected=f"at most {MOST_PARTS}",
                fix="name the folder of the data",
                code="data-size",
            )
        )
    # Parts without a wildcard are one step, so that the number of steps does not multiply the matches
    steps = list[str]()
    for literal, group in groupby(parts, lambda part: not any(mark in part for mark in "*?[")):
        names = list(group)
        steps += [str(PurePosixPath(*names))] if literal else names
    for part in (*steps, "*") if parts[-1:] == ("**",) else steps:
        search.seen.clear()
        paths = [match for place in paths for match in _matches(place, part, search)]
    return sorted(dict.fromkeys(paths))


def _matches(place: Path, part: str, search: Search) -> list[Path]:
    """The paths in a folder that one part of a pattern names."""
    if part == "**":
        return list(_folders_below(place, search))
    if not any(mark in part for mark in "*?["):
        return [place / part] if os.path.lexists(place / part) else []
    if not os.access(place, os.R_OK | os.X_OK) or not os.path.isdir(place):
        return []
    names = fnmatch.filter([entry.name for entry in search.entries(place)], part)
    return [place / name for name in names if part.startswith(".") or not name.startswith(".")]


def _folders_below(folder: Path, search: Search) -> Iterator[Path]:
    """Yield a folder and its subfolders, without hidden folders and without a folder that was read before."""
    waiting = [(folder, 0)]
    while waiting:
        folder, depth = waiting.pop()
        if not os.path.isdir(folder) or not search.is_new(folder):
            continue
        check_depth(folder, depth, search.key)
        yield folder
        below = [entry for entry in search.entries(folder) if not entry.name.startswith(".")]
        waiting += [(entry, depth + 1) for entry in reversed(below)]


def check_depth(folder: Path, depth: int, key: str = "") -> None:
    """Stop if a search has gone down too many levels (exit 2)."""
    if depth > MOST_LEVELS:
        raise UserError(
            Problem(
                "the folders are nested too deeply",
                key,
                where=str(folder)[:200],
                expected=f"at most {MOST_LEVELS} levels",
                fix="move the files to a folder near the top",
                code="data-size",
            )
        )


def walk(root: Path) -> Iterator[Path]:
    """Yield all entries below a folder. It follows no links. `os.walk` fails in deeply nested folders.

    Raises:
        UserError: the folders are nested too deeply (exit 2).
    """
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        check_depth(folder, depth)
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except FileNotFoundError:  # another process has deleted it
            continue
        for entry in entries:
            yield folder / entry.name
        folders = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting += [(folder / entry.name, depth + 1) for entry in reversed(folders)]
