"""`finetune doctor`: list installed packages and active optimizations."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli.inputs import load, located

MEASURE: tuple[str, dict[str, Any]] = (
    "--measure",
    {
        "action": "store_true",
        "help": "time matrix multiplications, attention and copies on this machine for `finetune plan`",
    },
)


def doctor(options: argparse.Namespace) -> dict[str, Any]:
    """Show packages, hardware, and which optimizations work here."""
    from finetune.cli import doctor_report

    recipe = load(options) if options.recipe else None
    with located(recipe):
        return doctor_report.run(recipe, quiet=options.quiet, measured=options.measure)
