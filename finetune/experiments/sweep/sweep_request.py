"""The request for a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class SweepRequest(NamedTuple):
    """The arguments of a sweep."""

    path: str
    overrides: list[str]
    space: Path
    folder: Path
    trials: int | None
    seconds: float | None
    """Time limit of this process. `None` means no limit."""
    url: str
    accelerate: str | None = None
    final: bool = False
