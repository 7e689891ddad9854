"""Commands work with closed standard streams."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# It opens a file after finetune's start, and prints to the numbers of the standard streams as C code does
PRINTS = """
import os, sys
from finetune.core import standard_streams
standard_streams.open_closed()
standard_streams.allow_closing()
with open(sys.argv[1], "w") as file:
    for number in (1, 2):
        os.write(number, b"a line of C code")
    print("a line"), print("a line", file=sys.stderr)
    file.write(f"{sys.stdin.isatty()} {sys.stdin.read()!r}")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_takes_the_place_of_a_closed_stream(closed: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PRINTS, str(tmp_path / "file")]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words],
        cwd=ROOT,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "False ''"


@pytest.mark.parametrize("closed", ["<&-", "2>&-"])
def test_command_that_asks_works_with_closed_streams(closed: str) -> None:
    words = [sys.executable, "-m", "finetune", "init"]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *words], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2


LETTERS = """
import sys
from rich.console import Console
from finetune.core import standard_streams
standard_streams.allow_closing()
standard_streams.say("in the log: ", "\u4e2d\u00e4\U0001f600")
standard_streams.say("\u4e2d\u00e4", error=True)
Console().print("in a table: \u4e2d\u00e4\U0001f600")
"""


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape", "latin-1", "cp1252", "gbk", "utf-8"])
def test_letter_that_the_encoding_of_a_terminal_lacks_is_an_escape(encoding: str) -> None:
    """Such as an example in Chinese in a log under LANG=en_US, at the end of a run."""
    done = subprocess.run(
        [sys.executable, "-c", LETTERS],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.decode(encoding.partition(":")[0])
    letters = ("\u4e2d", "\\u4e2d"), ("\u00e4", "\\xe4"), ("\U0001f600", "\\U0001f600")
    assert said.count("in ") == 2
    assert all(any(said.count(form) == 2 for form in forms) for forms in letters), said
