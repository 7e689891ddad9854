"""Tables fit into 80 and 120 columns, and break no word."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable

import pytest

from finetune.cli import doctor_report
from finetune.core import console
from finetune.core.console import Console
from finetune.planning import plan_report, planned_machine
from finetune.recipe import loader
from finetune.reporting import terminal
from support.paths import QUICKSTART, ROOT

LONG = 30  # characters of a word that a column may fold


def plan() -> None:
    recipe = loader.load(QUICKSTART, [])
    plan_report.run(recipe, [], Console(), planned_machine.Asked("l4", None, None, None))


def doctor() -> None:
    doctor_report.run(None, quiet=False, measured=False)


def result() -> None:
    recorded = json.loads((ROOT / "scripts" / "recorded_result.json").read_text(encoding="utf-8"))
    terminal.show_scores(Console(), recorded["result"])


def printed(show: Callable[[], None], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(console, "PLAIN_WIDTH", width)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show()
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("show", [plan, doctor, result], ids=lambda show: show.__name__)
def test_tables_fit_the_terminal_and_break_no_word(
    show: Callable[[], None], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {word for line in printed(show, 1_000, monkeypatch) for word in line.split()}
    lines = printed(show, width, monkeypatch)
    rows = [line for line in lines if len(line) <= width]  # a message is one line, which the terminal wraps
    assert len(rows) > 5
    broken = {word for line in rows for word in line.split()} - whole
    folded = [word for word in whole if len(word) >= LONG]  # paths and recipe keys
    assert {word for word in broken if not any(word in long for long in folded)} == set()
