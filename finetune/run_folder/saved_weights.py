"""Record a hash of each file of the trained weights, and find files that have changed since."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from finetune.core import safe_files, verified_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.run_folder.run_folder import RunFolder, open_run

RECORD = "weights.json"
OF_USERS = "README.md"  # the card of an adapter, which does not change the weights


def describe(folder: Path) -> dict[str, dict[str, int | str]]:
    """Map each file of a folder to its size and its hash."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != OF_USERS)
    return {str(path.relative_to(folder)): verified_files.describe(path) for path in paths}


def record(run: RunFolder, folder: Path) -> None:
    """Write weights.json for a new `adapter/` or `model/`."""
    run.write(RECORD, {"folder": folder.name, "files": describe(folder)})


def forget(run: RunFolder) -> None:
    """Delete weights.json before the weights are replaced."""
    safe_files.remove(run.path, RECORD)


def open_checked(path: str | Path) -> RunFolder:
    """Open a run whose weights a command uses. See `open_run` and `check` for the errors."""
    run = open_run(path)
    check(run)
    return run


def check(run: RunFolder) -> None:
    """Check that the files of the trained weights are as the run wrote them.

    A run of an earlier version has no record. Neither has a run that was published.

    Raises:
        UserError: a file changed or is missing (exit 4).
    """
    recorded = run.found(RECORD)
    if recorded and recorded["folder"] == run.weights.name:
        check_files(run.weights, recorded["files"], f"delete {RECORD} to use the files as they are")


def check_adapter(folder: Path) -> None:
    """Call `check` if a folder is the `adapter/` of a run."""
    run = RunFolder(folder.resolve().parent)
    if run.recipe.exists() and folder.resolve() == run.adapter:
        check(run)


def check_files(folder: Path, recorded: dict[str, dict[str, int | str]], otherwise: str) -> None:
    """Check that the files of a folder are as `describe` found them.

    Args:
        otherwise: what to do if the change was intended.

    Raises:
        UserError: a file changed or is missing (exit 4).
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
