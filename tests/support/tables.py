"""Tables on a terminal: not wider than the terminal, with whole words and at most four digits."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from typing import Any

import pytest

from finetune.core import console
from finetune.core.console import Console

WIDTHS = (80, 120)
_WIDER = 10_000
_DECIMAL = re.compile(r"(?<![\w.,])[\d,]+\.\d+(?![\w.])")  # no part of a version
Printed = list[tuple[tuple[Any, ...], dict[str, Any]]]


def assert_tables_fit(show: Callable[[], Any], count: int = 1) -> None:
    """The tables that `show` prints, at least `count` of them, fit into 80 and 120 columns."""
    printed: Printed = []
    table = Console.table

    def spy(screen: Console, title: str, columns: Any, rows: Any, **options: Any) -> None:
        printed.append(((title, columns, list(rows)), options))
        table(screen, title, columns, printed[-1][0][2], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "table", spy)
        show()
    assert len(printed) >= count, printed
    for given, options in printed:
        has_names = any(given[1])  # a table without names holds texts of the data, too
        _assert_fits(
            lambda given=given, options=options: Console().table(*given, **options), figures=has_names
        )


def _assert_fits(show: Callable[[], None], *, figures: bool) -> None:
    words = {word for line in _lines(show, _WIDER) for word in line.split()}
    paths = [word for word in words if len(word) > console.FOLDED]
    for width in WIDTHS:
        lines = _lines(show, width)
        assert [line for line in lines if len(line) > width] == []
        broken = {word for line in lines for word in line.split()} - words
        assert {word for word in broken if not any(word in path for path in paths)} == set(), lines
        numbers = [number for line in lines for number in _DECIMAL.findall(line)]
        assert not figures or [number for number in numbers if _digits(number) > 4] == []


def _lines(show: Callable[[], None], width: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(console, "PLAIN_WIDTH", width)
        show()
    return text.getvalue().splitlines()


def _digits(number: str) -> int:
    return len(re.sub(r"[.,]", "", number).lstrip("0"))
