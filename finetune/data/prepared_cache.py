"""Where prepared data is kept, and how `plan` finds it without a tokenizer.

`preparation` names a prepared dataset by its content, which takes the tokenizer to know. A small file beside
the datasets gives that name for a recipe's section, model files and data files as they are on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core.errors import Problem, UserError
from finetune.core.paths import why_not_makeable
from finetune.data import source_loading

if TYPE_CHECKING:
    from collections.abc import Iterable

    from finetune.recipe.schema import Data, Model

MODEL_KEYS = {"name", "revision", "add_tokens"}  # of `model:`, what decides on the token ids
POINTERS = "recipes"  # the folder of the small files
MODULES = (
    "examples", "messages", "formats", "hints", "source_loading", "readers", "chat_templates",
    "template_sandbox", "encoding", "loss_mask", "packing", "preparation", "arrow_store", "audit",
    "example_errors", "dataset_folders", "arrow_values", "json_values",
    "content_check",
)  # fmt: skip


def cache_folder(data: Data) -> Path:
    """Where prepared data is kept: `data.cache_dir`, else $FINETUNE_CACHE, else ~/.cache/finetune."""
    return Path(data.cache_dir or os.environ.get("FINETUNE_CACHE") or Path.home() / ".cache" / "finetune")


def check_makeable(data: Data) -> None:
    """Refuse a folder that prepared data can't be kept in, unless it is there already (exit 2)."""
    folder = cache_folder(data)
    if not folder.is_dir() and (reason := why_not_makeable(folder)):
        raise UserError(not_makeable(folder, reason))


def not_makeable(folder: Path, reason: str) -> Problem:
    """The problem of a folder that prepared data can't be kept in."""
    fix = "data.cache_dir: a folder that can be written, or FINETUNE_CACHE"
    return Problem(f"nothing can be kept in {folder}", "data.cache_dir", found=reason, fix=fix)


@cache
def code_digest() -> str:
    """A hash of the code that prepares data."""
    here = Path(__file__).parent
    files = [*(here / f"{name}.py" for name in MODULES), *sorted((here / "templates").glob("*.jinja"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def remember(data: Data, seed: int, model: Model, model_files: Iterable[Path], folder: Path) -> None:
    """Note the folder of a recipe's prepared data."""
    pointer = _pointer(data, seed, model, model_files)
    pointer.parent.mkdir(exist_ok=True)
    new = pointer.with_name(f".{pointer.name}.{os.getpid()}")
    new.write_text(folder.name)
    new.replace(pointer)


def recall(data: Data, seed: int, model: Model, model_files: Iterable[Path]) -> Path | None:
    """The folder of a recipe's prepared data, unless a file has changed since it was prepared."""
    try:
        folder = cache_folder(data) / _pointer(data, seed, model, model_files).read_text()
    except OSError:
        return None
    return folder if (folder / "report.json").is_file() else None


def _pointer(data: Data, seed: int, model: Model, model_files: Iterable[Path]) -> Path:
    named = source_loading.named(data)
    paths = [path for source, key in named for path in source_loading.files(source.name, key) or ()]
    template = Path(data.chat_template or "")
    every = [*paths, *model_files, *([template] if template.is_file() else [])]
    stated = [(str(path.resolve()), path.stat().st_mtime_ns, path.stat().st_size) for path in every]
    sections = [data.model_dump(exclude={"cache_dir"}), model.model_dump(include=MODEL_KEYS)]
    parts = [*sections, seed, stated, code_digest()]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_folder(data) / POINTERS / name
