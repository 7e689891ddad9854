"""Commands of finetune that a command prints: each is valid, and none is printed twice."""

from __future__ import annotations

import re
import shlex
from collections import Counter

from finetune.cli import main

_PURPOSE = r"  (?!found|expected|why|help)[a-z][^:]*:"
_COMMAND = re.compile(
    rf"^(?:next:|next, [^:]*:|{_PURPOSE}|.*; next:|  resume with:)? *((?:\S*/)?finetune (?:[a-z]+) ?.*)$",
    re.M,
)


def commands_in(text: str) -> list[str]:
    """Return the commands in a text, each on a line of its own or after `next:`."""
    return _COMMAND.findall(text)


def assert_commands_run(text: str, least: int = 1) -> None:
    """Each printed command is one that the parser accepts, without placeholders, and is printed once."""
    printed = commands_in(text)
    assert len(printed) >= least, text
    for command in printed:
        main.parse(shlex.split(command)[1:])
        assert not re.search(r"\b(?:RUN|RECIPE|NAME|FILE|FOLDER)\b", command), command
    assert [command for command, count in Counter(printed).items() if count > 1] == []
