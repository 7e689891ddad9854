"""Read untrusted files: only regular files, and only up to a size limit."""

from __future__ import annotations

import json
import os
import stat
from itertools import chain, islice
from pathlib import Path
from typing import Any

from finetune.core import strict_json
from finetune.core.errors import Problem, UserError

MIB = 2**20
MOST_ENTRIES = 10_000  # of a model's folder
LARGEST = 16 * MIB  # bytes of a file that is read at once, such as a config
# Files of a model that may be larger
LARGEST_BY_NAME = {
    "tokenizer.json": 128 * MIB,
    "model.safetensors.index.json": 64 * MIB,
    "vocab.json": 64 * MIB,
    "merges.txt": 64 * MIB,
    "tokenizer.model": 64 * MIB,
    "tekken.json": 64 * MIB,
}
TEMPLATES = "additional_chat_templates"  # the one folder in a model's folder that transformers reads
READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".yaml", ".yml", ".tiktoken", ".md")


def check_regular(path: Path, key: str = "", limit: int | None = None) -> None:
    """Check that a path is a regular file.

    A read of a pipe may wait forever, and a device may have no end. The same is true of some files of /proc
    and /sys, which look like regular files.

    Args:
        limit: the largest size in bytes.

    Raises:
        UserError: the path is a pipe, socket, device or folder, or the file is too large (exit 2).
        OSError: the path does not exist.
    """
    status = path.stat()
    kind = "" if stat.S_ISREG(status.st_mode) else _kind(status.st_mode)
    kind = kind or ("a file of the kernel" if is_of_kernel(path) else "")
    if kind:
        raise UserError(
            Problem(
                "finetune opens only regular files",
                key,
                where=str(path),
                found=kind,
                expected="a regular file",
                why="reading it may never end",
                fix="name a regular file, or copy the content into one",
                code="unsafe-file",
            )
        )
    if limit is not None and status.st_size > limit:
        raise UserError(
            Problem(
                "the file is too large to read into memory",
                key,
                where=str(path),
                found=f"{status.st_size:,} bytes",
                expected=f"at most {limit:,} bytes",
                fix="use a smaller file",
                code="unsafe-file",
            )
        )


def is_of_kernel(path: Path) -> bool:
    """Return whether a file or folder is below /proc or /sys, where users can't create files."""
    return f"{os.path.realpath(path)}/".startswith(("/proc/", "/sys/"))


def check_folder(folder: Path, key: str) -> None:
    """Check that a model's or adapter's folder has only regular files and folders (exit 2).

    Files that are read at once must not be too large.
    """
    found = entries(folder)
    templates = [entry for entry in found if entry.parent != folder and entry.is_file()]
    if (size := sum(entry.stat().st_size for entry in templates)) > LARGEST:
        raise UserError(
            Problem(
                "the named chat templates are too large",
                key,
                where=str(folder / TEMPLATES),
                found=f"{size:,} bytes",
                expected=f"at most {LARGEST:,} bytes",
                fix="delete the templates that you do not need",
                code="unsafe-file",
            )
        )
    for entry in found:
        if not entry.exists() or (entry.is_dir() and entry.name not in LARGEST_BY_NAME):
            continue  # the code that needs the file reports a broken link
        check_regular(entry, key, limit_of(entry) if entry.suffix in READ_WHOLE else None)


def entries(folder: Path) -> list[Path]:
    """Return the files and folders of a model's or adapter's folder, with its named chat templates.

    Raises:
        UserError: there are too many (exit 2).
    """
    inside = folder / TEMPLATES
    folders = [folder, inside] if inside.is_dir() and not inside.is_symlink() else [folder]
    found = [sorted(islice(one.iterdir(), MOST_ENTRIES + 1)) for one in folders]
    if max(map(len, found)) > MOST_ENTRIES:
        raise UserError(
            Problem(
                "the folder of a model has too many entries",
                where=str(folder),
                expected=f"at most {MOST_ENTRIES:,} files and folders",
                fix="copy the files of the model to a folder of their own",
                code="unsafe-file",
            )
        )
    return list(chain.from_iterable(found))


def limit_of(path: Path) -> int:
    """Return the largest size in bytes of a file that is read at once."""
    return LARGEST_BY_NAME.get(path.name, LARGEST)


def read_text(path: Path, key: str = "", encoding: str = "utf-8") -> str:
    """Return the text of a file.

    Raises:
        UserError: it is not a regular file, or it is too large (exit 2).
        OSError: it does not exist.
        UnicodeDecodeError: it is not in `encoding`.
    """
    check_regular(path, key, limit_of(path))
    return path.read_text(encoding=encoding)


def read_json(path: Path, key: str = "") -> Any:
    """Return the content of a JSON file.

    Raises:
        UserError, OSError: as `read_text`.
        ValueError: the text is not JSON, or it is nested too deeply.
    """
    try:
        text = read_text(path, key)
        strict_json.check_size(text)
        content = json.loads(text)
        strict_json.check_depth(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return content


def _kind(mode: int) -> str:
    for is_kind, name in (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    ):
        if is_kind(mode):
            return name
    return "not a file"
