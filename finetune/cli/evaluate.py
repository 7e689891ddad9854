"""`finetune evaluate`: compare the base model with the fine-tuned model."""

from __future__ import annotations

import argparse
import functools
import json
from typing import TYPE_CHECKING, Any

from finetune.cli import arguments
from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import opened
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from finetune.hardware.detection import Hardware
    from finetune.launch.launcher import LaunchChoice
    from finetune.run_folder.run_folder import RunFolder

EVALUATE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--tasks",
        {
            "metavar": "TASK",
            "nargs": "+",
            "help": "names of lm-eval tasks, or task files, instead of eval.tasks",
        },
    ),
)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the base model and the fine-tuned model of a run."""
    from finetune.core.console import Console, quieten_libraries
    from finetune.evaluation import tasks
    from finetune.launch import launcher
    from finetune.run_folder import run_folder

    if options.tasks is not None:  # `--tasks a,b c eval.limit=8`
        named = [part for text in options.tasks if "=" not in text for part in text.split(",")]
        options.overrides += [text for text in options.tasks if "=" in text]
        options.overrides.append(f"eval.tasks={json.dumps(named)}")
    run = opened(options)
    settings = run_folder.recipe_of(run, options.overrides).eval
    tasks.check(settings)
    tasks.check_names(settings)
    again = ["evaluate", str(run.path), *options.overrides, *arguments.flags(options)]
    launcher.if_needed(again, functools.partial(processes_of, run, options.overrides))
    quieten_libraries()
    with fast_imports(quiet=options.quiet):
        from finetune.evaluation import evaluator
        from finetune.evaluation.scoring import memory_errors
    from finetune.reporting import html_report, terminal

    screen = Console(quiet=options.quiet)
    with memory_errors():
        result = evaluator.run(run.path, options.overrides, screen=screen)
    if launch_environment.is_main():
        terminal.show_scores(screen, result)
        html_report.after(run.path, screen)
    return result


def processes_of(run: RunFolder, overrides: list[str], machine: Hardware) -> LaunchChoice:
    """Return how a run is evaluated on a machine with several GPUs."""
    from finetune.evaluation import evaluation_launch

    return evaluation_launch.launch_of(run, overrides, machine)
