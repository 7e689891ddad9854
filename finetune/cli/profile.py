"""`finetune profile`: trace one training step and suggest what to change."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import load, located
from finetune.distributed import launch_environment

TRACED: tuple[str, dict[str, Any]] = (
    "--output",
    {"metavar": "DIR", "help": "folder for the trace (default: runs/profile-RECIPE)"},
)


def profile(options: argparse.Namespace) -> dict[str, Any]:
    """Trace one training step, and show where the time goes."""
    from finetune.core import progress
    from finetune.core.console import Console, quieten_libraries
    from finetune.preflight import checker

    with located(recipe := load(options)):
        checker.check_without_examples(recipe)
        quieten_libraries()
        with fast_imports(quiet=options.quiet):
            from finetune.profiling import profiler

        screen = Console(quiet=options.quiet or not launch_environment.is_main())
        with progress.phase(screen, "profile", parts=1):
            found = profiler.command(options.recipe, options.overrides, options.output, screen)
        return profiler.as_json(found)
