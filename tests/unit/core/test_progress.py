"""Long phases show a bar on a terminal and lines elsewhere; short phases and quiet commands show nothing."""

import io

import pytest
from rich.console import Console as RichConsole

from finetune.core import progress
from finetune.core.console import Console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of the monotonic clock; a test sets them."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(console: Console, clock: list[float], total: int | None, seconds: float) -> None:
    with progress.phase(console, "scoring"):
        for _ in progress.track([[1, 2]] * 50, total):
            clock[0] += seconds


def test_without_a_terminal_a_line_every_30_seconds(clock, capsys) -> None:
    shown(Console(), clock, 100, 2.0)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "scoring: 30 of 100, 70 s left",
        "scoring: 60 of 100, 40 s left",
        "scoring: 90 of 100, 10 s left",
    ]
    shown(Console(), clock, None, 2.0)
    assert capsys.readouterr().out.splitlines()[0] == "scoring: 30"


@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_short_phases_print_no_line(seconds, clock, capsys) -> None:
    shown(Console(), clock, 100, seconds)
    shown(Console(quiet=True), clock, 100, 60.0)
    assert list(progress.track([[1]], 1)) == [[1]]
    assert capsys.readouterr().out == ""


def test_terminal_has_a_bar_with_the_time_left(clock) -> None:
    console, text = Console(), io.StringIO()
    console.console = RichConsole(file=text, force_terminal=True, width=80)
    shown(console, clock, 100, 2.0)
    assert "scoring" in text.getvalue() and "100/100" in text.getvalue()


def test_phases_end_with_their_block(clock, capsys) -> None:
    with pytest.raises(ZeroDivisionError), progress.phase(Console(), "a"):
        raise ZeroDivisionError
    for _ in progress.track([[1]] * 9, 9):
        clock[0] += 60
    assert capsys.readouterr().out == ""
