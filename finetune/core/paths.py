"""Paths in a recipe: resolve them, suggest similar ones, and report write errors."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from finetune.core.errors import Problem, UserError, nearest
from finetune.core.regular_files import check_regular, is_of_kernel

LFS_POINTER = b"version https://git-lfs"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a file or folder that can't be written as an error of the user (exit 2)."""
    try:
        yield
    except OSError as error:
        raise UserError(
            Problem(
                "finetune can't write to this path",
                where=str(path),
                found=error.strerror or str(error),
                fix=f"choose a path that you can write to, such as {Path.home() / path.name}",
                code="path",
            )
        ) from error


def why_not_makeable(path: Path) -> str:
    """Return why a folder can't be created or written to; the empty string if it can. Create nothing."""
    if not is_utf8(path):
        return "its name is not UTF-8"
    # A link that leads nowhere takes the place of a folder, too
    above = next(one for one in (path.absolute(), *path.absolute().parents) if os.path.lexists(one))
    if not above.is_dir():
        return os.strerror(errno.EEXIST if above == path.absolute() else errno.ENOTDIR)
    if is_of_kernel(above):
        return f"{os.strerror(errno.EPERM)}: a folder of the kernel"
    return "" if os.access(above, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def is_utf8(path: Path) -> bool:
    """Return whether the bytes of a path are UTF-8. pyarrow opens no other path."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_lfs_pointer(path: Path, key: str = "") -> None:
    """Stop if a file is only the pointer of Git LFS to a large file (exit 2)."""
    check_regular(path, key)
    with path.open("rb") as file:
        is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    if is_pointer:
        raise UserError(
            Problem(
                "the file is a Git LFS pointer",
                key,
                where=str(path),
                fix="git lfs pull",
                why="Git LFS has not downloaded the file itself",
                code="model-files",
            )
        )


def local_path(name: str) -> bool:
    """Return whether `name` is a path and not a Hub id: it exists, or it has the form of a path."""
    if os.path.exists(os.path.expanduser(name)) or any(mark in name for mark in "*?["):
        return True
    looks_like_file = Path(name).suffix in DATA_SUFFIXES or ("/" not in name and "." in name)
    return looks_like_file or name.startswith((".", "/", "~")) or name.count("/") > 1


DATA_SUFFIXES = frozenset({".jsonl", ".json", ".csv", ".parquet", ".arrow", ".tar", ".txt"})


def can_be_path(name: str) -> bool:
    """Return whether the system accepts a name as a path. It refuses names with NUL and very long names."""
    try:
        os.stat(name)
    except ValueError:
        return False
    except OSError as error:
        return error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)
    return True


def similar_files(path: Path) -> str:
    """Return an existing path with one name similar to that of a missing path, or an empty string.

    For a folder, name its YAML files.
    """
    if path.is_dir():
        inside = [entry.name for entry in sorted(path.iterdir()) if entry.suffix in (".yaml", ".yml")]
        return f"name a file of this folder: {', '.join(inside[:5])}" if inside else ""
    parts = path.parts
    for place, part in enumerate(parts):  # a name above may be wrong too
        above = Path(*parts[:place])
        if not (above / part).exists():
            match = nearest(part, {entry.name for entry in above.iterdir()}) if above.is_dir() else ""
            found = above / match / Path(*parts[place + 1 :])
            return str(found) if match and found.exists() else ""
    return ""


def free_name(path: Path) -> str:
    """Return the path with the first number that makes it a new name, such as `runs/shop-2`."""
    return next(name for number in count(2) if not os.path.lexists(name := f"{path}-{number}"))


def similar_folder(name: str) -> str:
    """Return a local folder with a name similar to a Hub id, which the user may have meant."""
    path = Path(name.partition("@")[0])
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    match = nearest(path.name, {entry.name for entry in beside if entry.is_dir()})
    return str(path.parent / match) if match else ""


def on_the_hub(name: str) -> str:
    """Return a note that finetune takes a name for a Hub id, so that a user sees a mistyped path."""
    near = similar_folder(name)
    if near:
        return f"{name} is not a local folder, so finetune looks for it on the Hub (the folder {near} exists)"
    return f"{name} is on the Hub"
