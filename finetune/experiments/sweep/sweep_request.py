"""The request for a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


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
