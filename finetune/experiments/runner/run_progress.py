"""Read how far a run is from its metrics.jsonl, for the progress of an experiment."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAIL = 8_192  # bytes at the end of metrics.jsonl, which hold several lines
EPOCHS = 3.0  # the default of train.num_train_epochs


def share_of_steps(folder: Path, max_steps: int | None, epochs: float | None) -> Callable[[], float]:
    """Return a function that returns the share of a run's training steps that are logged.

    Args:
        folder: the run folder, which may not exist yet.
        max_steps: `train.max_steps` of the run.
        epochs: `train.num_train_epochs` of the run, which counts without `max_steps`.
    """
    key, whole = ("step", max_steps) if max_steps else ("epoch", epochs or EPOCHS)

    def share() -> float:
        with contextlib.suppress(OSError), (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            for line in reversed(file.read().split(b"\n")):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is being written
                    return float(json.loads(line)[key]) / whole
        return 0.0

    return share
