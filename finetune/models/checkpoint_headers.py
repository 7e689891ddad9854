"""Read tensor names and shapes from safetensors headers, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.core.paths import refuse_lfs_pointer
from finetune.core.weight_files import DOWNLOAD, find_weight_files
from finetune.models import module_names
from finetune.models.module_names import Names

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_LINEAR = ("embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out")


def tensors(folder: Path) -> dict[str, list[int]]:
    """The shape of each tensor in the weight files that transformers reads from a folder, by name.

    Reads only the headers: milliseconds for any size, no torch.

    Raises:
        UserError: a file that is missing, is not safetensors or is cut off (exit 2).
    """
    found: dict[str, list[int]] = {}
    for path in find_weight_files(folder):
        try:
            found |= _header(path)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            refuse_lfs_pointer(path, "model.name")
            problem = Problem("not a safetensors file", "model.name", str(path), str(error), fix=DOWNLOAD)
            raise UserError(problem) from error
    return found


def _header(path: Path) -> dict[str, list[int]]:
    """The shapes that one file's header gives (the format: https://huggingface.co/docs/safetensors).

    `safe_open` of safetensors imports numpy before it opens a file, a fifth of what `finetune check` takes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"its header would be {length:,} bytes, the file is {size:,}")
        header = json.loads(file.read(length))
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    ends = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if ends != size:
        raise ValueError(f"its tensors end at byte {ends:,}, the file is {size:,}")
    return {name: entry["shape"] for name, entry in entries.items()}


def in_folder(folder: Path) -> Names:
    """Names of a local model, from the headers of its files."""
    return of_tensors(of_text_model(tensors(folder)))


def of_tensors(tensors: Mapping[str, Sequence[int]]) -> Names:
    """Names of a model with tensors of these shapes."""
    modules = [name.removesuffix(".weight") for name in tensors if name.endswith(".weight")]
    linear = [name for name in modules if len(tensors[f"{name}.weight"]) == 2]
    tied = ["lm_head"] if tensors and "lm_head" not in modules else []  # not written a second time
    return Names(
        [name for name in linear if module_names.short(name) not in _NOT_LINEAR],
        modules + tied,
        list(tensors),
    )


def of_text_model(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """All tensors but those of a multimodal model's towers, which no text runs through."""
    text = {name for name in tensors if {module_names.TEXT_MODEL, "lm_head"} & set(name.split("."))}
    towers = any(module_names.TEXT_MODEL in name.split(".") for name in text)
    return {name: shape for name, shape in tensors.items() if name in text} if towers else tensors
