"""Markdown of texts that finetune did not write: they stay text, and make no link, image, tag or row."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from finetune.core.visible_text import visible, visible_lines

_ACTING = re.compile(r"([\\<`]|!(?=\[)|\](?=[(\[:]))")  # outside of code spans
_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")  # it ends at a run of as many backquotes


def plain(text: object, without: str = "") -> str:
    """Return a text on one line in which Markdown finds only code spans.

    Args:
        without: a character that no code span may have. Such a span becomes text.
    """
    line = " ".join(visible_lines(text).split())
    parts, at = [], 0
    for span in _SPAN.finditer(line):
        if without and without in span[0]:
            continue
        parts += [_escaped(line[at : span.start()]), span[0]]
        at = span.end()
    return "".join([*parts, _escaped(line[at:])])


def code(text: object) -> str:
    """A code span that ends where the text does."""
    return f"`{visible(text).replace('`', chr(39))}`"


def block(text: str, language: str) -> str:
    """A code block that no line of the text ends."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}{fence}"


def table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A table whose cells hold texts."""
    header = [_cell(column) for column in columns]
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: object) -> str:
    return plain(text, without="|").replace("|", "\\|")


def _escaped(text: str) -> str:
    return _ACTING.sub(r"\\\1", text)
