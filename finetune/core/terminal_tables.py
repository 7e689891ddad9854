"""Lay out a table for a terminal. No column breaks a word, and a table that does not fit becomes a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP = 2  # characters between two columns
FOLDED = 30  # a longer word is a path or a recipe key, and may be folded
INDENT = 2


def render(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table | Group:
    """Return a table of at most `width` characters, or a list of its rows if the columns do not fit."""
    lines = [list(columns), *map(list, rows)]
    natural = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    words = [max(map(_longest_word, column)) for column in zip(*lines, strict=True)]
    room = width - GAP * (len(columns) - 1)
    for least in ([natural[0], *words[1:]], words):  # the first column wraps last
        if sum(least) <= room:
            return _table(columns, rows, _widths(natural, least, room))
    if len(columns) <= 2:  # a very narrow terminal
        return _table(columns, rows, _widths(natural, [min(word, room // 2) for word in words], room))
    return Group(*_as_list(columns, rows, width))


def _longest_word(text: str) -> int:
    return min(FOLDED, max(map(cell_len, text.split()), default=0))


def _widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the width of each column, at least `least`. Columns that need few characters grow first."""
    needs = [most - few for most, few in zip(natural, least, strict=True)]
    free, given = room - sum(least), list(least)
    by_need = sorted(range(len(needs)), key=needs.__getitem__)
    for place, index in enumerate(by_need):
        grown = min(needs[index], free // (len(by_need) - place))
        given[index] += grown
        free -= grown
    return given


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=any(columns))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column), overflow="fold", header_style="dim", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _as_list(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Text | Padding]:
    """Yield each row as its first cell, and below it a line for each other cell with its column's name."""
    for first, *cells in rows:
        yield Text(first, overflow="fold")
        named = [(name, cell) for name, cell in zip(columns[1:], cells, strict=True) if cell]
        if named:
            yield Padding(render(("", ""), named, width - INDENT), (0, 0, 0, INDENT))
