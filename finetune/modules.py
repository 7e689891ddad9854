"""Names of a model's linear layers, read from its safetensors headers, and what a list of targets matches."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import Problem, UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_NOT_ADAPTED = ("embed_tokens", "lm_head", "wte", "wpe")


def linear_names(folder: Path) -> list[str]:
    """Full names of the two-dimensional weights of a local model, without embeddings and head.

    Reads only the headers (8 bytes of length, then JSON): milliseconds for any size, no torch.
    """
    names = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
            if length + 8 > file.stat().st_size:
                fix = "download it again; a Git LFS pointer is a few lines of text in its place"
                raise UserError(Problem("not a safetensors file", "model.name", str(file), fix=fix))
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if (
                name.endswith(".weight")
                and len(tensor["shape"]) == 2
                and short(name[:-7]) not in _NOT_ADAPTED
            ):
                names.append(name.removesuffix(".weight"))
    return names


def short(name: str) -> str:
    """`model.layers.0.self_attn.q_proj` -> `q_proj`."""
    return name.rpartition(".")[2]


def match(targets: str | Iterable[str], names: Collection[str]) -> dict[str, int]:
    """How many of `names` each target matches, by PEFT's rules: a suffix, or one string as a whole regex."""
    if targets == "all-linear":
        return {"all-linear": len(names)}
    if isinstance(targets, str):
        try:
            return {targets: sum(bool(re.fullmatch(targets, name)) for name in names)}
        except re.error as error:
            problem = Problem(f"not a regular expression: {error}", "adapter.target_modules", found=targets)
            raise UserError(problem) from None
    return {t: sum(name == t or name.endswith(f".{t}") for name in names) for t in targets}


def unmatched(
    targets: str | Iterable[str], names: Collection[str], key: str = "target_modules"
) -> list[Problem]:
    """A problem for each target that matches no layer, with the nearest name and the names there are."""
    available = list(dict.fromkeys(short(name) for name in names))
    problems = []
    for index, (target, count) in enumerate(match(targets, names).items()):
        if not count:
            place = f"adapter.{key}" if isinstance(targets, str) else f"adapter.{key}.{index}"
            what = f'"{target}" matches no module of this model'
            fix = nearest(target, available)
            if isinstance(targets, str) and target in available:
                fix = f"[{target}]: a text is a regular expression for whole names"
            problems.append(Problem(what, place, found=", ".join(available), fix=fix))
    return problems
