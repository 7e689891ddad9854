"""The files of a dataset repository on the Hub at one commit: list them, and download those that are read."""

from __future__ import annotations

import contextlib
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from finetune.core import safe_files, standard_streams, verified_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.verified_files import Damaged
from finetune.hub import client

MOST_FILES = 100_000  # of a repository
LONGEST_PATH, LONGEST_NAME = 1000, 255  # in bytes; file systems allow no longer names
MOST_LEVELS = 50  # of nested folders
DOWNLOADS = 8  # at the same time
FOLDER = "hub"  # in the cache: one list of files for each commit that was read


class Repository(NamedTuple):
    """A dataset repository at one commit."""

    name: str
    commit: str
    files: dict[str, int]
    """Path in the repository: size in bytes."""


def read(name: str, revision: str | None) -> Repository:
    """Return the files of a repository at a revision. The list of a commit is kept in the cache.

    Without a network, a branch has the commit at which finetune read it the last time.

    Raises:
        UserError: a file has an odd path, or there are too many files (exit 2).
        Exception: huggingface_hub's exceptions, if the Hub does not answer.
    """
    revision = revision or "main"
    commit = client.dataset_commit(name, revision)
    known = _known(name, commit)
    if known is None:
        known = _asked(name, commit)
        _remember(known, known.commit)
    elif commit != known.commit:
        say_once(f"the Hub does not answer, so finetune reads {name} at the last commit: {known.commit}")
    if commit == known.commit != revision:
        _remember(known, revision)
    return known


@cache
def say_once(note: str) -> None:
    """Print a note. A run reads its data several times."""
    standard_streams.say(f"note: {note}", error=True)


def download_all(repository: Repository, paths: list[str]) -> dict[str, Path]:
    """Download several files at the same time, and return the local path of each. See `download`."""
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        return dict(zip(paths, pool.map(partial(download, repository), paths), strict=True))


def download(repository: Repository, path: str) -> Path:
    """Download a file into the Hub's cache, and return its path there.

    Raises:
        UserError: the file in the cache has another size (exit 4).
        Exception: huggingface_hub's exceptions, if the Hub does not answer.
    """
    from huggingface_hub import hf_hub_download

    found = Path(hf_hub_download(repository.name, path, repo_type="dataset", revision=repository.commit))
    size = found.stat().st_size
    if size != repository.files[path]:
        raise UserError(
            Problem(
                "a file in the Hub's cache is damaged",
                where=str(found),
                found=f"{size:,} bytes",
                expected=f"{repository.files[path]:,} bytes",
                fix="delete the file",
                code="data-changed",
            ),
            code=Exit.ARTIFACT,
        )
    return found


def _asked(name: str, commit: str) -> Repository:
    from huggingface_hub import HfApi

    api = HfApi()
    if not client.COMMIT.fullmatch(commit):  # raises the reason why the Hub gives no commit
        commit = str(api.dataset_info(name, revision=commit).sha)
    entries: Any = api.list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
    files: dict[str, int] = {}
    for entry in islice(entries, 2 * MOST_FILES):
        size: object = getattr(entry, "size", None)  # of a folder there is none
        if size is None:
            continue
        path = str(entry.path)
        if not _is_plain(path) or not isinstance(size, int):
            raise _refused(f"a file has the path {path[:200]!r}", name)
        files[path] = size
    if len(files) > MOST_FILES:
        raise _refused(f"more than {MOST_FILES:,} files", name)
    return Repository(name, commit, files)


def _is_plain(path: str) -> bool:
    """Return whether a path stays in its repository, and whether a file system can hold it."""
    parts = path.split("/")
    is_short = (
        len(path.encode()) <= LONGEST_PATH and max(len(part.encode()) for part in parts) <= LONGEST_NAME
    )
    is_short &= len(parts) <= MOST_LEVELS
    return is_short and path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _refused(found: str, name: str) -> UserError:
    return UserError(
        Problem(
            f"finetune can't read the list of files of the dataset {name}",
            "data.name",
            found=found,
            expected=f"at most {MOST_FILES:,} files with plain paths",
            fix="download the files that you want to read, and name them in data.name",
            code="data-size",
        )
    )


def _record(name: str, revision: str) -> tuple[Path, str]:
    """Return the root of finetune's cache and the name of a record in it."""
    root = Path(os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")
    key = hashlib.sha256("\0".join((client.endpoint(), name, revision)).encode()).hexdigest()[:32]
    return root, f"{FOLDER}/{key}.json"


def _known(name: str, revision: str) -> Repository | None:
    root, record = _record(name, revision)
    try:
        found = verified_files.read_signed(root / record)
        return Repository(name, found["commit"], found["files"]) if found["name"] == name else None
    except (Damaged, LookupError, TypeError):
        return None


def _remember(repository: Repository, revision: str) -> None:
    if not client.COMMIT.fullmatch(repository.commit):
        return
    root, record = _record(repository.name, revision)
    with contextlib.suppress(OSError, UserError):  # a cache that can't be written costs one request
        root.mkdir(parents=True, exist_ok=True)
        safe_files.make_folder(root, FOLDER)
        safe_files.write_text(root, record, verified_files.signed(repository._asdict()))
