"""Cache of prepared data, which `plan` can use without loading a tokenizer.

    <folder>/<key>/rows.arrow, report.json   prepared data; the key is a hash of all of its inputs
    <folder>/recipes/<hash>                  the key for a recipe section, model files and data files

report.json holds its own hash, its key, and the hash of rows.arrow. Each process verifies them before it uses
the data. finetune prepares damaged data again, prints a note, and replaces the data by one rename. Processes
that find the damage at the same time all end with the same content.

Several users can share the folder. A hash finds accidental damage, but not a change by a user with write
permission. Share the folder only with users who may decide what you train on. finetune uses the prepared data
of another user if it verifies, and prints a note. It does not use such data from a folder that everybody can
write to. New files have the permissions of your umask.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from finetune.core import safe_files, verified_files
from finetune.core.errors import Problem, UserError
from finetune.core.paths import is_utf8, why_not_makeable
from finetune.core.regular_files import is_of_kernel
from finetune.core.verified_files import Damaged
from finetune.data import source_loading
from finetune.recipe.schema import Data, Model

MODEL_KEYS = {"name", "revision", "add_tokens"}  # keys of `model:` that determine the token ids
POINTERS = "recipes"  # subfolder of the recipe files
ROWS, REPORT = "rows.arrow", "report.json"
TRIES = 5  # attempts to rename prepared data to its final name while other processes do the same
_KEY = re.compile("[0-9a-f]{24}")


def cache_folder(data: Data) -> Path:
    """Return the cache folder: `data.cache_dir`, else $FINETUNE_CACHE, else ~/.cache/finetune."""
    return Path(data.cache_dir or os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")


def check_makeable(data: Data) -> None:
    """Raise a UserError if the cache folder does not exist and cannot be created (exit 2)."""
    folder = cache_folder(data)
    can_have_data = is_utf8(folder) and folder.is_dir() and not is_of_kernel(folder)
    if not can_have_data and (reason := why_not_makeable(folder)):
        raise UserError(not_makeable(folder, reason))


def not_makeable(folder: Path, reason: str) -> Problem:
    """Return the problem of a cache folder that cannot be written."""
    what, fix = f"finetune can't write to the cache {folder}", "set data.cache_dir or $FINETUNE_CACHE"
    return Problem(what, "data.cache_dir", found=reason, fix=f"{fix} to a folder of yours", code="cache")


@cache
def code_digest() -> str:
    """Return a hash of the code that prepares data."""
    here = Path(__file__).parent
    files = sorted([*here.glob("*.py"), *(here / "templates").glob("*.jinja")])
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def start(cache: Path) -> Path:
    """Create a folder in the cache in which data is prepared (exit 2 if that fails).

    The folder has the permissions of the umask. A folder of `tempfile` would not be readable by other users.
    """
    if reason := why_not_makeable(cache):
        raise UserError(not_makeable(cache, reason))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f".building-{secrets.token_hex(8)}"
        building.mkdir()
    except OSError as error:
        raise UserError(not_makeable(cache, str(error.strerror))) from None
    return building


def seal(building: Path, key: str, reports: dict[str, Any]) -> None:
    """Write report.json with the reports and the hash of rows.arrow."""
    safe_files.write_text(
        building,
        REPORT,
        verified_files.signed(
            {"key": key, "files": {ROWS: verified_files.describe(building / ROWS)}, **reports}
        ),
    )


def read(folder: Path) -> dict[str, Any] | None:
    """Return the reports of prepared data after verification, or `None` if there is no data.

    Raises:
        Damaged: the data does not verify.
        UserError: the data belongs to another user, in a folder that everybody can write to (exit 2).
    """
    try:
        owner = folder.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Damaged(f"{folder.name} can't be read ({error.strerror})") from None
    if not stat.S_ISDIR(owner.st_mode):
        raise Damaged(f"{folder.name} is not a folder")
    _refuse_unreadable(folder, owner.st_uid)
    found = verified_files.read_signed(folder / REPORT)
    if found.pop("key", None) != folder.name:
        raise Damaged(f"{REPORT} belongs to other data")
    verified_files.verify(folder / ROWS, found.pop("files")[ROWS])
    _refuse_strangers(folder, owner.st_uid)
    return found


def owner_of(folder: Path) -> str:
    """Return the other user who owns a folder, or an empty string for this user and root."""
    owner = folder.lstat().st_uid
    return "" if owner in (os.geteuid(), 0) else f"user {owner}"


def _refuse_unreadable(folder: Path, owner: int) -> None:
    """Refuse data of another user that this user may not read. It is not damaged, so it stays."""
    if owner == os.geteuid():
        return
    files = (folder / name for name in (REPORT, ROWS))
    if not _may(folder, os.R_OK | os.X_OK) or any(one.exists() and not _may(one, os.R_OK) for one in files):
        raise UserError(
            Problem(
                "finetune may not read the prepared data of another user",
                "data.cache_dir",
                where=str(folder),
                found=f"the folder belongs to user {owner}",
                fix="set data.cache_dir or $FINETUNE_CACHE to your own folder, or ask the owner to share it",
                code="cache",
            )
        )


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _refuse_strangers(folder: Path, owner: int) -> None:
    if owner not in (os.geteuid(), 0) and folder.parent.stat().st_mode & stat.S_IWOTH:
        why, fix = "everybody can write to the folder above it", "set data.cache_dir or $FINETUNE_CACHE"
        raise UserError(
            Problem(
                f"finetune does not trust the cache {folder}",
                "data.cache_dir",
                found=f"the folder belongs to user {owner}",
                fix=f"{fix} to a folder of yours",
                why=why,
                code="cache",
            )
        )


def publish(building: Path, folder: Path) -> None:
    """Rename new data to its final name. It replaces damaged data, but not valid data of another process.

    Raises:
        UserError: the folder cannot be written (exit 2).
    """
    for _ in range(TRIES):
        try:
            building.rename(folder)
            return
        except OSError as error:
            if not os.path.lexists(folder):
                raise UserError(not_makeable(folder, str(error.strerror))) from None
        with contextlib.suppress(Damaged):
            if read(folder):  # another process was faster
                return
        _remove(folder)
    raise UserError(not_makeable(folder, "other processes replace it again and again"))


def _remove(folder: Path) -> None:
    """Remove damaged data. The folder is renamed first, so that no process sees half of it."""
    aside = folder.with_name(f".damaged-{secrets.token_hex(8)}")
    try:
        folder.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    except OSError as error:
        raise UserError(
            Problem(
                "finetune can't replace damaged data in the cache",
                "data.cache_dir",
                where=str(folder),
                found=str(error.strerror),
                fix=f"rm -r {folder}",
                code="cache",
            )
        ) from None
    if aside.is_symlink() or not aside.is_dir():
        aside.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def remember(data: Data, seed: int, model: Model, model_files: Iterable[Path], folder: Path) -> None:
    """Store the key of a recipe's prepared data for `plan`, if the folder can be written."""
    pointer = _pointer(data, seed, model, model_files)
    text = verified_files.signed({"recipe": pointer.name, "key": folder.name})
    with contextlib.suppress(OSError):
        safe_files.make_folder(pointer.parent.parent, POINTERS)
        safe_files.write_text(pointer.parent.parent, f"{POINTERS}/{pointer.name}", text)


def recall(data: Data, seed: int, model: Model, model_files: Iterable[Path]) -> Path | None:
    """Return the folder of a recipe's prepared data, or `None` if a file has changed since.

    `reports` verifies the data.

    Raises:
        Damaged: the file that names the folder does not verify. `train` replaces it.
    """
    pointer = _pointer(data, seed, model, model_files)
    if not os.path.lexists(pointer):
        return None
    noted = verified_files.read_signed(pointer)
    if noted.get("recipe") != pointer.name or not _KEY.fullmatch(str(noted.get("key"))):
        raise Damaged(f"{pointer.name} belongs to another recipe")
    folder = cache_folder(data) / str(noted["key"])
    return folder if os.path.lexists(folder) else None


@cache  # a plan and each of its suggestions call this
def reports(folder: Path) -> dict[str, Any] | None:
    """Return the result of `read`, verified once per process. See `read` for the errors."""
    return read(folder)


def _pointer(data: Data, seed: int, model: Model, model_files: Iterable[Path]) -> Path:
    named = source_loading.named(data)
    paths = [path for source, key in named for path in source_loading.files_of(source, key) or ()]
    template = Path(data.chat_template or "")
    every = [*paths, *model_files, *([template] if template.is_file() else [])]
    stated = [(str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size) for path in every]
    sections = [
        data.model_dump(exclude={"cache_dir", "max_example_bytes", "max_uncompressed_bytes"}),
        model.model_dump(include=MODEL_KEYS),
    ]
    parts = [*sections, seed, stated, code_digest()]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder(data) / POINTERS / name
