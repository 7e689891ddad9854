"""Tables fit into 80 and 120 columns, and break no word."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from finetune.cli import doctor_report
from finetune.core.console import Console
from finetune.planning import plan_report, planned_machine
from finetune.recipe import loader
from finetune.reporting import terminal
from support import tables
from support.paths import QUICKSTART, ROOT


def plan() -> None:
    recipe = loader.load(QUICKSTART, [])
    plan_report.run(recipe, [], Console(), planned_machine.PlanRequest("l4", None, None, None))


def doctor() -> None:
    doctor_report.run(None, quiet=False, measured=False)


def result() -> None:
    recorded = json.loads((ROOT / "scripts" / "recorded_result.json").read_text(encoding="utf-8"))
    terminal.show_scores(Console(), recorded["result"])


@pytest.mark.parametrize("show", [plan, doctor, result], ids=lambda show: show.__name__)
def test_tables_fit_the_terminal_and_break_no_word(show: Callable[[], None]) -> None:
    tables.assert_tables_fit(show)
