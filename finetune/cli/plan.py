"""`finetune plan`: estimate memory, time and cost."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli import arguments
from finetune.cli.inputs import load, located
from finetune.core.command_lines import next_step

PLAN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--gpu", {"metavar": "NAME", "help": "GPU to plan for, such as h100-80gb (default: this machine)"}),
    (
        "--gpus",
        {
            "metavar": "N",
            "type": arguments.number_of_gpus,
            "help": "number of GPUs (default: all GPUs of this machine, or 1 with --gpu)",
        },
    ),
    (
        "--accelerate",
        {
            "metavar": "FILE",
            "help": "accelerate config (default: the config that `finetune train` would choose)",
        },
    ),
    (
        "--price-per-hour",
        {
            "metavar": "X",
            "type": arguments.at_least_zero,
            "help": "price of one GPU per hour, in any currency",
        },
    ),
)


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Estimate memory, time and cost. Loads no weights."""
    from finetune.core.console import Console
    from finetune.planning import plan_report, planned_machine

    with located(recipe := load(options)):
        request = planned_machine.PlanRequest(
            options.gpu, options.gpus, options.price_per_hour, options.accelerate
        )
        screen = Console(quiet=options.quiet)
        planned, suggested = plan_report.run(recipe, options.overrides, screen, request)
    then = plan_report.next_command(planned, suggested)
    if then and not options.json:
        name, *changes = then
        of_command = {"train": ("accelerate",), "plan": ("gpu", "gpus", "accelerate"), "data": ()}[name]
        given = [
            (f"--{one}", str(value)) for one in of_command if (value := getattr(options, one)) is not None
        ]
        words = [options.recipe, *options.overrides, *changes, *(word for pair in given for word in pair)]
        screen.say(next_step(name, *words))
    return plan_report.as_json(planned, suggested)
