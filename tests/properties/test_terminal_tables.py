"""A table of any content fits the terminal, breaks no word and loses none."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from finetune.core import console

WORD = st.text("abcdefgh0123456789.:-", min_size=1, max_size=24)
CELL = st.lists(WORD, max_size=8).map(" ".join)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.integers(1, 12))
    line = st.lists(CELL, min_size=columns, max_size=columns)
    return draw(line), draw(st.lists(line, max_size=5))


@given(tables(), st.integers(60, 140))
def test_render_fits_the_width_and_breaks_no_word(
    table: tuple[list[str], list[list[str]]], width: int
) -> None:
    columns, rows = table
    text = io.StringIO()
    Console(file=text, width=width).print(console.render_table(columns, rows, width), markup=False)
    lines = text.getvalue().splitlines()
    assert max((len(line.rstrip()) for line in lines), default=0) <= width
    printed = [word for line in lines for word in line.split()]
    known = {word for line in (columns, *rows) for cell in line for word in cell.split()}
    assert set(printed) <= known
    assert {word for row in rows for cell in row for word in cell.split()} <= set(printed)


def test_render_lists_the_rows_of_a_table_that_does_not_fit() -> None:
    columns = ["optimization", *(f"column-{number}" for number in range(12))]
    text = io.StringIO()
    rows = [["packing", "1.25", *[""] * 10, "2.5"]]
    Console(file=text, width=60).print(console.render_table(columns, rows, 60))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert lines == [["packing"], ["column-0", "1.25"], ["column-11", "2.5"]]


def test_render_folds_a_word_that_no_column_can_hold() -> None:
    text = io.StringIO()
    Console(file=text, width=20).print(console.render_table(("", ""), [("folder", "x" * 50)], 20))
    assert "".join(text.getvalue().split()) == "folder" + "x" * 50
