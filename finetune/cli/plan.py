"""`finetune plan`: estimate memory, time and cost."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli import arguments
from finetune.cli.inputs import load, located

PLAN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--gpu", {"metavar": "NAME", "help": "such as h100-80gb; without it what is here"}),
    ("--gpus", {"metavar": "N", "type": arguments.at_least_one, "help": "GPUs: 1, or all that are here"}),
    (
        "--accelerate",
        {"metavar": "FILE", "help": "an accelerate config; without it the one train would take"},
    ),
    (
        "--price-per-hour",
        {"metavar": "X", "type": arguments.at_least_zero, "help": "of one GPU, in any currency"},
    ),
)


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Say what a recipe takes in memory, time and money before a weight is loaded, and what to change."""
    from finetune.core.console import Console
    from finetune.planning import plan_report

    with located(recipe := load(options)):
        asked = plan_report.Asked(options.gpu, options.gpus, options.price_per_hour, options.accelerate)
        screen = Console(quiet=options.quiet)
        return plan_report.as_json(*plan_report.run(recipe, options.overrides, screen, asked))
