"""Describe the files of the trained weights by a hash of each, and find files that have changed since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.core import verified_files
from finetune.core.errors import Exit, Problem, UserError

READ = {".json", ".jinja", ".model", ".safetensors", ".txt"}  # files that transformers and PEFT look for
OF_USERS = "README.md"  # the card of an adapter, which does not change the weights


def described(folder: Path) -> dict[str, dict[str, int | str]]:
    """Map each file of a folder to its size and its hash."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != OF_USERS)
    return {str(path.relative_to(folder)): verified_files.describe(path) for path in paths}


def check_files(folder: Path, recorded: dict[str, dict[str, int | str]], otherwise: str) -> None:
    """Check that the files of a folder are as `described` found them.

    Args:
        otherwise: what to do if the change was intended.

    Raises:
        UserError: a file changed, is missing or is new (exit 4).
    """
    changes = list(_changes(folder, recorded))
    if changes:
        more = f", and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise UserError(
            Problem(
                "the saved weights have changed since finetune wrote them",
                where=str(folder),
                found="; ".join(changes[:5]) + more,
                fix=f"restore the files from a copy, or {otherwise}",
                code="run-damaged",
            ),
            code=Exit.ARTIFACT,
        )


def _changes(folder: Path, recorded: dict[str, dict[str, int | str]]) -> Iterator[str]:
    # A record can name any file of this machine. Only files of the folder are read.
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for name, stated in recorded.items():
        try:
            if name not in paths:
                raise verified_files.Damaged(f"{name} is missing")
            verified_files.verify(paths[name], stated)
        except verified_files.Damaged as damage:
            yield str(damage)
    for name in sorted(paths.keys() - recorded.keys()):
        if paths[name].suffix in READ:
            yield f"{name} is new"
