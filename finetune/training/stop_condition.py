"""When a run ends before its last step."""

from __future__ import annotations

import time
from typing import NamedTuple


class Until(NamedTuple):
    """When a run ends before its last step, with a checkpoint."""

    text: str
    step: int | None = None
    time: float | None = None
    """A time of day, in seconds since 1970. The clock may change during the run."""
    deadline: float | None = None
    """A time of `time.monotonic()`: the end of a duration, which a change of the clock does not move."""

    def reached(self, step: int, seconds: float) -> bool:
        """Whether the run ends after this step.

        Args:
            seconds: that one more step and a checkpoint would take.
        """
        if self.step is not None and step >= self.step:
            return True
        if self.time is not None and time.time() + seconds > self.time:
            return True
        return self.deadline is not None and time.monotonic() + seconds > self.deadline
