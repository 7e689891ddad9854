"""The one error a user meets, its message and the exit codes.

error: adapter.r: must be at least 1 (recipes/a.yaml:12:6)
  found:     0
  expected:  a whole number >= 1
  try:       r: 16
"""

from __future__ import annotations

import errno
import re
from collections.abc import Set
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING

from finetune.core.privacy import masked

if TYPE_CHECKING:
    from collections.abc import Iterable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: there is no room on the disk


class Exit(IntEnum):
    """What the process says to the shell when it ends."""

    DONE = 0
    INPUT = 2  # the user's input: recipe, data, command line
    ENVIRONMENT = 3  # a package, the hardware, the network, credentials
    ARTEFACT = 4  # a checkpoint or saved adapter that does not verify
    TRAINING = 5  # non-finite loss, out of memory at the smallest batch, a broken promise in training
    STOPPED = 75  # stopped by a signal, resumable

    @classmethod
    def of(cls, code: int) -> Exit:
        """Of a process that has ended with `code`: TRAINING where that is none of these."""
        return cls(code) if code in list(cls) else cls.TRAINING


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and what to do about it."""

    what: str
    key: str = ""
    """Dotted recipe key (`adapter.r`); the command line turns it into file:line:col."""
    where: str = ""
    found: str = ""
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        key = re.sub(r"(\.\d+)+$", "", self.key)  # an item's place is its own, its name the list's
        head = f"error: {key}: {self.what}" if key else f"error: {self.what}"
        lines = [f"{head} ({self.where})" if self.where else head]
        for label, text in (("found", self.found), ("expected", self.expected), ("try", self.fix)):
            if text:
                lines.append(f"  {label + ':':<10} {text}")
        return masked("\n".join(lines))


class UserError(Exception):
    """All problems found at one point, raised together."""

    def __init__(self, *said: Problem | str, code: Exit = Exit.INPUT) -> None:
        # torch raises a loader worker's error again with its traceback as text; its last part is ours
        problems = tuple(
            Problem(p.rpartition("UserError: error: ")[2].strip()) if isinstance(p, str) else p for p in said
        )
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
        self.code = code


def first_line(error: BaseException | str) -> str:
    """Of what an error says; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Stopped(KeyboardInterrupt):
    """A run that was told to end, and can be resumed (exit 75); its text says what it leaves behind."""

    folder = ""
    """The run folder, once there is one."""
    together = False
    """Whether all processes of the launch end so."""


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that `name` most likely means, or the empty string.

    Two letters that changed places come first (lroa: lora, not road), then a name that was not ended (adam:
    the first that begins so), then the likest.
    """
    asked, offered = name.lower(), sorted(names) if isinstance(names, Set) else names
    by_lower = {candidate.lower(): candidate for candidate in offered}
    turned = [asked[:i] + asked[i : i + 2][::-1] + asked[i + 2 :] for i in range(len(asked) - 1)]
    found = [other for other in (asked, *turned) if other in by_lower]
    found += [other for other in by_lower if len(asked) > 2 and other.startswith(asked)]
    found += get_close_matches(asked, by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else ""
