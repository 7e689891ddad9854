"""Read the files of a run folder."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING

from finetune.core import progress

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from finetune.run_folder.run_folder import RunFolder


def run_checks(run: RunFolder) -> dict[str, dict[str, str]]:
    """Return a run's checks by option."""
    return {check["option"]: check for check in run.read("checks.json")}


def metrics(run: RunFolder) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def digests(checkpoint: Path) -> dict[str, str]:
    """File -> sha256, as the manifest of a checkpoint has them."""
    from finetune.checkpointing import checkpoints  # imports torch

    files = checkpoints.read_json(checkpoint, checkpoints.MANIFEST)["files"]
    return {name: said["sha256"] for name, said in files.items()}


def keep_what_is_imported() -> None:
    """Once a run has imported the libraries: every collection would look at all of their objects."""
    gc.collect()
    gc.freeze()


def show_progress_at_once(patch: pytest.MonkeyPatch) -> None:
    """Print the progress of each phase at once and often, not after 3 s and each 30 s."""
    for name, seconds in (("FIRST", 0.0), ("BETWEEN", 0.0), ("REFRESH", 0.2)):
        patch.setattr(progress, name, seconds)
