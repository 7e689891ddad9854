"""Find regular expressions that take too long: `(a+)+x` takes years on a long name.

Python's `re` cannot be stopped. So a process of its own tries the patterns first, and the kernel ends it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from finetune.core import slow_patterns

SECONDS = 0.2  # of the processor for all patterns, and for each match
SECONDS_PER_MATCH = 1e-4
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
    """The index of the first pattern that takes too long to match with the texts."""
    seconds = SECONDS + SECONDS_PER_MATCH * len(patterns) * len(texts)
    request = json.dumps([patterns, list(texts), seconds])
    return slow_patterns.first_slow(_TRY, request, "-S")


def is_plain(text: str) -> bool:
    """Whether a regular expression takes one step for each of its characters."""
    return _PLAIN.fullmatch(text) is not None
