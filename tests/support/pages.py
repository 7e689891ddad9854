"""The pages of the documentation, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WITH_README = [ROOT / "README.md", *PAGES]
_FENCE = re.compile(
    r"^(?P<fence>`{3,}|:{3,})(?P<language>[\w{}-]*)[^\n]*\n(?P<text>.*?)^(?P=fence)[ ]*$", re.M | re.S
)
_SAVED = re.compile(r"[Ss]ave this as `([\w./-]+)`|[Aa]nd this as `([\w./-]+)`")


class Block(NamedTuple):
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str = "") -> list[Block]:
    """The code blocks of a page, of one language if it is given."""
    text = page.read_text(encoding="utf-8")
    found = [
        Block(page, text.count("\n", 0, match.start()) + 1, match["language"], match["text"])
        for match in _FENCE.finditer(text)
        if match["fence"].startswith("`")
    ]
    return [block for block in found if not language or block.language == language]


def commands(page: Path) -> list[tuple[str, str]]:
    """The console lines of a page, each with its place; comments are cut off."""
    lines = []
    for block in blocks(page, "bash"):
        for number, line in enumerate(block.text.splitlines(), block.line + 1):
            for command in line.partition("  #")[0].partition(" # ")[0].split(" && "):
                if command.strip():
                    lines.append((f"{page.relative_to(ROOT)}:{number}", command.strip()))
    return lines


def saved_files(page: Path) -> dict[str, str]:
    """The files that a page tells its reader to save: "Save this as `name`", then a block."""
    text, files = page.read_text(encoding="utf-8"), {}
    for match in _SAVED.finditer(text):
        after = _FENCE.search(text, match.end())
        if after:
            files[match[1] or match[2]] = after["text"]
    return files


def prose(page: Path) -> str:
    """A page without code blocks, inline code, generated blocks and recorded tables."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- table: \w+ -->.*?<!-- end of table -->", "", text, flags=re.S)
    text = re.sub(r"<!-- recorded -->.*?<!-- end of recorded -->", "", text, flags=re.S)
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub(lambda f: "" if f["fence"][0] == "`" else f["text"], text))
