"""When a run ends before its last step."""

from __future__ import annotations

from typing import NamedTuple


class Until(NamedTuple):
    """When a run ends before its last step, with a checkpoint."""

    text: str
    step: int | None = None
    time: float | None = None
    """Seconds since 1970."""
