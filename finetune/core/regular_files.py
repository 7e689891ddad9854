"""Read files that a stranger may have made: regular files only, and none that memory has no room for."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

from finetune.core import strict_json
from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
LARGEST = 16 * MIB  # bytes of a file that is read whole, such as a config
# Files of a model that may be larger
LARGEST_BY_NAME = {
    "tokenizer.json": 128 * MIB,
    "model.safetensors.index.json": 64 * MIB,
    "vocab.json": 64 * MIB,
    "merges.txt": 64 * MIB,
    "tokenizer.model": 64 * MIB,
    "tekken.json": 64 * MIB,
}
READ_WHOLE = (".json", ".jinja", ".txt", ".model", ".yaml", ".yml", ".tiktoken", ".md")


def check_regular(path: Path, key: str = "", limit: int | None = None) -> None:
    """Refuse what is no regular file: opening a pipe waits without an end, and a device has none.

    The files of /proc and /sys look like regular files, and some of them wait or have no end too.

    Args:
        limit: the most bytes that the file may have.

    Raises:
        UserError: it is a pipe, socket, device or folder, or too large (exit 2).
        OSError: nothing is there.
    """
    found = path.stat()
    kind = "" if stat.S_ISREG(found.st_mode) else _kind(found.st_mode)
    kind = kind or ("a file of the kernel" if is_of_kernel(path) else "")
    if kind:
        what, why = "finetune opens only regular files", "reading it may never end"
        raise UserError(Problem(what, key, str(path), kind, "a regular file", why=why, code="unsafe-file"))
    if limit is not None and found.st_size > limit:
        size, most = f"{found.st_size:,} bytes", f"at most {limit:,} bytes"
        what = "the file is too large to read into memory"
        raise UserError(Problem(what, key, str(path), size, most, code="unsafe-file"))


def is_of_kernel(path: Path) -> bool:
    """Whether a file or folder is below /proc or /sys, where nobody can make a file."""
    where = path.resolve()
    return any(where.is_relative_to(top) for top in ("/proc", "/sys"))


def check_folder(folder: Path, key: str) -> None:
    """Refuse a model's or adapter's folder with an entry that is neither a regular file nor a folder, or with
    a file that would be read whole and is too large (exit 2)."""
    for entry in sorted(folder.iterdir()):
        if not entry.exists() or (entry.is_dir() and entry.name not in LARGEST_BY_NAME):
            continue  # a link that leads nowhere is reported by who needs it
        check_regular(entry, key, limit_of(entry) if entry.suffix in READ_WHOLE else None)


def limit_of(path: Path) -> int:
    """The most bytes that a file which is read whole may have."""
    return LARGEST_BY_NAME.get(path.name, LARGEST)


def read_text(path: Path, key: str = "", encoding: str = "utf-8") -> str:
    """The whole text of a file.

    Raises:
        UserError: not a regular file, or too large (exit 2).
        OSError: nothing is there.
        UnicodeDecodeError: not UTF-8.
    """
    check_regular(path, key, limit_of(path))
    return path.read_text(encoding=encoding)


def read_json(path: Path, key: str = "") -> Any:
    """The content of a JSON file.

    Raises:
        UserError, OSError: as `read_text`.
        ValueError: not JSON, or nested too deeply.
    """
    try:
        content = json.loads(read_text(path, key))
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
