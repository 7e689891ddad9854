"""Write and read files in an untrusted folder without following links.

Every function takes the folder that the user named and a relative name below it. The folder itself may be a
link, because the user chose it. Below it, each part of a name is opened relative to the open folder above it.
A link ends the command (exit 2), even if it appears during the write. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from finetune.core.errors import Problem, UserError

LARGEST = 256 * 2**20  # bytes of a file that is read at once
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block
_DESCRIPTORS = Path("/proc/self/fd")


class PrivateFolder(NamedTuple):
    """A new folder for a library that writes files itself."""

    path: Path
    """The path to write to. On Linux it leads to the open folder, even if the folder is renamed."""
    name: str
    """The folder's name below the root, for `rename`."""


def write_bytes(root: Path, name: str, content: bytes) -> None:
    """Replace a file with `content` atomically, and flush it to the disk."""
    with _open_parent(root, name) as (parent, leaf):
        _refuse_link(parent, leaf, root / name)
        _refuse_device(parent, leaf, root / name)
        temporary = _temporary_name(leaf)
        try:
            with os.fdopen(_create(parent, temporary), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, leaf, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:  # also Ctrl-C, to delete the temporary file
            with contextlib.suppress(OSError):  # only the first error is reported
                os.unlink(temporary, dir_fd=parent)
            raise


def write_text(root: Path, name: str, text: str) -> None:
    """Replace a file with `text` in UTF-8 atomically."""
    write_bytes(root, name, text.encode("utf-8", "replace"))  # UTF-8 can't encode half a surrogate pair


def open_new(root: Path, name: str) -> IO[str]:
    """Replace a file by an empty file, and open it to write text."""
    remove(root, name)
    with _open_parent(root, name) as (parent, leaf):
        descriptor = _create(parent, leaf)
        return open(root / name, "w", encoding="utf-8", opener=lambda *_: descriptor)


def open_log(path: str | Path) -> IO[str]:
    """Open an empty file for the output of a process. `os.devnull` is opened as it is."""
    if str(path) == os.devnull:
        return open(path, "w", encoding="utf-8")
    return open_new(Path(path).parent, Path(path).name)


def open_append(root: Path, name: str) -> IO[str]:
    """Open a file to read it and to append text.

    A file with hard links is copied first, because another name may be a file of somebody else.
    """
    with _open_parent(root, name) as (parent, leaf):
        _refuse_link(parent, leaf, root / name)
        if (status := _status(parent, leaf)) and status.st_nlink > 1:
            write_bytes(root, name, read_bytes(root, name))
        descriptor = os.open(leaf, os.O_RDWR | os.O_APPEND | os.O_CREAT | _FILE, 0o666, dir_fd=parent)
        descriptor = _regular(descriptor, root / name)
        return open(root / name, "a+", encoding="utf-8", opener=lambda *_: descriptor)


def read_bytes(root: Path, name: str, largest: int = LARGEST) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file is missing or can't be opened.
        UserError: a part of the path is a link, the path is not a regular file, or the file is too large.
    """
    with _open_parent(root, name) as (parent, leaf):
        _refuse_link(parent, leaf, root / name)
        descriptor = _regular(os.open(leaf, os.O_RDONLY | _FILE, dir_fd=parent), root / name)
        with os.fdopen(descriptor, "rb") as file:
            if (size := os.fstat(descriptor).st_size) > largest:
                raise UserError(
                    Problem(
                        "the file is too large to read into memory",
                        where=str(root / name),
                        found=f"{size:,} bytes",
                        expected=f"at most {largest:,} bytes",
                        fix="restore the file from a copy",
                        code="unsafe-file",
                    )
                )
            return file.read()


def read_text(root: Path, name: str, largest: int = LARGEST) -> str:
    """Return the text of a regular file as `read_bytes` does. Invalid UTF-8 raises a ValueError."""
    return read_bytes(root, name, largest).decode("utf-8")


def make_folder(root: Path, name: str) -> Path:
    """Make a folder and its parents below the root, and return its path. They may exist already."""
    with _open_parent(root, f"{name}/.", make=True):
        return root / name


@contextlib.contextmanager
def private_folder(root: Path, name: str) -> Iterator[PrivateFolder]:
    """Make a new folder next to `name`, under a name that nobody can predict.

    The folder is deleted at the end, unless it was renamed.
    """
    with _open_parent(root, name) as (parent, leaf):
        own = _temporary_name(leaf)
        os.mkdir(own, dir_fd=parent)
        opened = _open_below(parent, own, root / name)
        below = str(PurePosixPath(name).with_name(own))
        seen = _DESCRIPTORS / str(opened)
        try:
            yield PrivateFolder(seen if seen.is_dir() else root / below, below)
        finally:
            os.close(opened)
            shutil.rmtree(own, ignore_errors=True, dir_fd=parent)


@contextlib.contextmanager
def replace_folder(root: Path, name: str) -> Iterator[Path]:
    """Make a new folder, and replace the folder `name` with it at the end of the block."""
    with private_folder(root, name) as private:
        yield private.path
        apply_umask(root / private.name)
        remove(root, name)
        rename(root, private.name, name)


def apply_umask(folder: Path) -> None:
    """Give the files in a new folder the permissions of your umask. The folder itself has them already.

    safetensors (0.8) writes files that only their owner can read. A server often runs as another user.
    """
    for _, _, names, opened in os.fwalk(folder):
        mode = stat.S_IMODE(os.fstat(opened).st_mode) & 0o666
        for name in names:
            if stat.S_ISREG(os.lstat(name, dir_fd=opened).st_mode):
                file = os.open(name, os.O_RDONLY | _FILE, dir_fd=opened)
                try:
                    os.fchmod(file, stat.S_IMODE(os.fstat(file).st_mode) | mode)
                finally:
                    os.close(file)


def rename(root: Path, name: str, to: str) -> None:
    """Rename a file or folder below the root. A folder replaces an empty one, a file replaces a file."""
    with _open_parent(root, name) as (parent, leaf), _open_parent(root, to) as (new_parent, new_leaf):
        _refuse_link(parent, leaf, root / name)
        _refuse_link(new_parent, new_leaf, root / to)
        _refuse_device(new_parent, new_leaf, root / to)
        os.rename(leaf, new_leaf, src_dir_fd=parent, dst_dir_fd=new_parent)


def remove(root: Path, name: str) -> None:
    """Delete a file, or a folder with its content, if it exists. For a link, delete only the link."""
    try:
        with _open_parent(root, name) as (parent, leaf):
            _refuse_device(parent, leaf, root / name)
            if stat.S_ISDIR(os.lstat(leaf, dir_fd=parent).st_mode):
                shutil.rmtree(leaf, dir_fd=parent)
            else:
                os.unlink(leaf, dir_fd=parent)
    except FileNotFoundError:
        return


@contextlib.contextmanager
def _open_parent(root: Path, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds `name`, and return it with the last part of the name.

    Args:
        make: whether to make missing folders.
    """
    *above, leaf = _parts(root, name)
    opened, path = os.open(root, _FOLDER), Path(root)
    try:
        for part in above:
            path = path / part
            if make:
                with contextlib.suppress(FileExistsError):  # the next line opens it and checks for links
                    os.mkdir(part, dir_fd=opened)
            below = _open_below(opened, part, path)
            os.close(opened)
            opened = below
        yield opened, leaf
    finally:
        os.close(opened)


def _open_below(parent: int, leaf: str, path: Path) -> int:
    """Open a folder in an open folder."""
    try:
        return os.open(leaf, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            _refuse_link(parent, leaf, path)
        raise


def _create(parent: int, leaf: str) -> int:
    return os.open(leaf, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=parent)


def _parts(root: Path, name: str) -> list[str]:
    """Return the parts of a relative name, and check that it stays below the root."""
    parts = name.split("/")
    if name.startswith("/") or "\0" in name or ".." in parts or not parts[0]:
        raise UserError(
            Problem(
                "this name leads out of its folder",
                where=str(root),
                found=repr(name),
                fix="use a name without `..` and without a leading `/`",
                code="unsafe-file",
            )
        )
    return [part for part in parts[:-1] if part not in ("", ".")] + parts[-1:]


def _temporary_name(leaf: str) -> str:
    return f".{leaf.lstrip('.')[:100]}.{secrets.token_hex(8)}.tmp"


def _status(parent: int, leaf: str) -> os.stat_result | None:
    """Return the status of an entry of an open folder without following a link. `None`: there is none."""
    try:
        return os.lstat(leaf, dir_fd=parent)
    except FileNotFoundError:
        return None


def copy_of_link(link: Path) -> str:
    """Return the shell command that replaces a link with a copy of its file."""
    place = shlex.quote(str(link))
    return f'cp --remove-destination "$(readlink -f {place})" {place}'


def _refuse_link(parent: int, leaf: str, path: Path) -> None:
    status = _status(parent, leaf)
    if status and stat.S_ISLNK(status.st_mode):
        raise UserError(
            Problem(
                "finetune follows no link in this folder",
                where=str(path),
                found=f"a link to {os.readlink(leaf, dir_fd=parent)}",
                fix=copy_of_link(path),
                why="a link can lead out of the folder",
                code="unsafe-file",
            )
        )


def _refuse_device(parent: int, leaf: str, path: Path) -> None:
    """Refuse a device, such as `/dev/null`: a rename over it would delete it for the whole machine."""
    status = _status(parent, leaf)
    if status and (stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)):
        raise UserError(
            Problem(
                "finetune does not write to a device",
                where=str(path),
                found="a device",
                why="finetune replaces a file, and this would delete the device",
                fix="name a file that does not exist yet",
                code="unsafe-file",
            )
        )


def _regular(descriptor: int, path: Path) -> int:
    """Return the descriptor, and check that it belongs to a regular file."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(
            Problem(
                "finetune opens only regular files",
                where=str(path),
                expected="a regular file, or nothing at this path",
                fix="move what is at this path, and run the command again",
                why="a link or a pipe at this path could lead finetune to another file",
                code="unsafe-file",
            )
        )
    return descriptor
