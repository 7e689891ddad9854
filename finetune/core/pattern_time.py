"""Find regular expressions that take too long: `(a+)+x` takes years on a long name.

Python's `re` cannot be stopped. So a process of its own tries the patterns first, and the kernel ends it.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from finetune.core.errors import Exit, Problem, UserError

SECONDS = 0.2  # of the processor for all patterns, and for each match
SECONDS_PER_MATCH = 1e-4
# Seconds after which a process that does not end is killed. The patterns have less processor time
HANGS = 120
_PLAIN = re.compile(r"[^*+?{|(\[]*")  # no repeats, choices, groups and sets
_TRY = """
import json, re, signal, sys
patterns, texts, seconds = json.load(sys.stdin)
signal.setitimer(signal.ITIMER_PROF, seconds)
for number, (method, pattern) in enumerate(patterns):
    print(number, flush=True)
    try:
        match = getattr(re.compile(pattern), method)
    except (re.error, OverflowError, RecursionError):
        continue  # which the caller finds too
    for text in texts:
        match(text)
print(len(patterns))
"""


class Pattern(NamedTuple):
    """A regular expression and the method that matches it."""

    method: str
    """`match`, `fullmatch` or `search`."""
    text: str


def find_slow(patterns: Sequence[Pattern], texts: Collection[str]) -> int | None:
    """Return the index of the first pattern that takes too long to match with the texts, or `None`."""
    seconds = SECONDS + SECONDS_PER_MATCH * len(patterns) * len(texts)
    request = json.dumps([patterns, list(texts), seconds])
    return first_slow(_TRY, request, "-S")


def first_slow(program: str, request: str, *options: str) -> int | None:
    """Return the number of the first pattern that takes too long, or `None`.

    Args:
        program: Python code. It prints the number of each pattern before it tries it, and limits its own
            processor time.
        request: the text on its standard input.
        options: options of Python in addition to `-I`.

    Raises:
        UserError: something other than a pattern ended or stopped the process (exit 3).
    """
    command = [sys.executable, "-I", *options, "-c", program]
    try:
        ended = subprocess.run(
            command, input=request, capture_output=True, text=True, check=False, timeout=HANGS
        )
    except subprocess.TimeoutExpired:
        raise _ended(f"it did not end within {HANGS} s") from None
    if not ended.returncode:
        return None
    begun = ended.stdout.split()
    if not begun or ended.returncode == -signal.SIGKILL:  # before a pattern, or as Linux does without memory
        raise _ended(f"it ended with status {ended.returncode}")
    return int(begun[-1])


def _ended(found: str) -> UserError:
    return UserError(
        Problem(
            "the process that tests regular expressions ended without a result",
            found=found,
            fix="close other programs and run the command again; `free -h` shows the memory",
            code="process-limit",
        ),
        code=Exit.ENVIRONMENT,
    )


def is_plain(text: str) -> bool:
    """Return whether a regular expression takes one step for each of its characters."""
    return _PLAIN.fullmatch(text) is not None
