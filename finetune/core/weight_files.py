"""Find the safetensors files of a folder that transformers and PEFT read. Imports no torch.

A folder may hold more of them: `consolidated.safetensors`, shards of an older save, a variant such as
`model.fp16.safetensors`, or an optimizer's state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from finetune.core import regular_files
from finetune.core.errors import Exit, Problem, UserError, first_line

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
DOWNLOAD = "download the model again"
MOST_FILES = 10_000  # of an index; the largest models have a few hundred


def find_weight_files(folder: Path, key: str = "model.name") -> list[Path]:
    """The files that `from_pretrained` reads from a model's or adapter's folder; empty if there are none.

    Raises:
        UserError: an index that names files that are missing, or is not an index (exit 2).
    """
    is_adapter = (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()
    names = [ADAPTER] if is_adapter else _expected_names(folder, key)
    first = next((folder / name for name in names if (folder / name).is_file()), None)
    if first is None or not first.name.endswith(".index.json"):
        return [first] if first else []
    return _files_of_index(first, key)


def _files_of_index(index: Path, key: str) -> list[Path]:
    """The files that an index names, each of which exists."""
    try:
        names = sorted(set(regular_files.read_json(index, key)["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            Problem(
                "the file is not an index of weight files",
                key,
                where=str(index),
                found=str(error)[:200],
                fix=DOWNLOAD,
                code="model-files",
            )
        ) from None
    if len(names) > MOST_FILES:
        raise UserError(
            Problem(
                "the index names too many weight files",
                key,
                where=str(index),
                found=f"{len(names):,}",
                expected=f"at most {MOST_FILES:,}",
                fix=DOWNLOAD,
                code="model-files",
            )
        )
    missing = [name for name in names if not (is_plain_name(name) and (index.parent / name).is_file())]
    if missing:
        raise UserError(
            Problem(
                f"{len(missing)} of the {len(names)} weight files are missing",
                key,
                where=str(index),
                found=f"no {', '.join(map(str, missing[:5]))}",
                fix=DOWNLOAD,
                code="model-files",
            )
        )
    return [index.parent / name for name in names]


def check_weight_files(folder: Path) -> None:
    """Refuse a model's folder without weights that `from_pretrained` reads (exit 2)."""
    if find_weight_files(folder, "model.name"):
        return
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
    found = f"only {', '.join(others[:5])}" if others else "no weights"
    fix = "download the model again, with all of its files"
    if any("-of-" in name for name in others):
        fix = f"download {INDEX}, which names these files"
    elif others and others[0].startswith("model."):  # a variant
        fix = f"rename the file to {SINGLE}"
    elif any(name.startswith("consolidated") for name in others):
        fix = "use the model's checkpoint in the format of transformers"
    raise UserError(
        Problem(
            "the folder has no weights that transformers reads",
            "model.name",
            where=str(folder),
            found=found,
            expected=" or ".join(_expected_names(folder, "model.name")),
            fix=fix,
            code="model-files",
        )
    )


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """Open a safetensors file for torch, without reading a tensor.

    Raises:
        UserError: the file is damaged (exit 4).
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            Problem(
                "the file is damaged or is not a safetensors file",
                where=str(path),
                found=first_line(error),
                fix="restore the file from a copy, or download it again",
                code="model-files",
            ),
            code=Exit.ARTIFACT,
        ) from None


def is_plain_name(file: object) -> bool:
    """Whether a value is the name of a safetensors file, without a path."""
    if not isinstance(file, str) or "\\" in file or "\0" in file:
        return False
    return PurePosixPath(file).name == file and file.endswith(".safetensors")


def _expected_names(folder: Path, key: str) -> list[str]:
    """The names that `from_pretrained` looks for, the first that exists wins."""
    try:
        config: Any = regular_files.read_json(folder / "config.json", "model.name")
        named = config.get("transformers_weights")
    except (OSError, ValueError, AttributeError):  # `read_config` reports it
        named = None
    if not named:
        return [SINGLE, INDEX]
    if not isinstance(named, str) or not (
        is_plain_name(named) or is_plain_name(named.removesuffix(".index.json"))
    ):
        raise UserError(
            Problem(
                "the key names no weight file of this folder",
                key,
                where=str(folder / "config.json"),
                found=f"transformers_weights: {str(named)[:200]}",
                expected="a name that ends in .safetensors or .safetensors.index.json",
                fix="move the files into the folder, and remove the key",
                code="model-files",
            )
        )
    return [named]
