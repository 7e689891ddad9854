"""`finetune doctor`: what is installed and which optimizations are active."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli.inputs import load, located

MEASURE: tuple[str, dict[str, Any]] = (
    "--measure",
    {"action": "store_true", "help": "time products, attention and copies here, for `finetune plan`"},
)


def doctor(options: argparse.Namespace) -> None:
    """Say what is installed, what this machine can do and which optimization is active, and why."""
    from finetune.cli import doctor_report

    recipe = load(options) if options.recipe else None
    with located(recipe):
        doctor_report.run(recipe, quiet=options.quiet, measured=options.measure)
