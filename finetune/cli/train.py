"""`finetune train`: arguments, and the steps of the command."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import arguments
from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import counted, load, located
from finetune.core.errors import Stopped
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from finetune.run_folder.run_folder import RunFolder
    from finetune.training.pipeline import Verbosity


TRAIN: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--accelerate",
        {"metavar": "FILE", "help": "accelerate config: a file, or the name of a shipped config"},
    ),
    (
        "--resume",
        {
            "metavar": "[=auto]",
            "type": arguments.resume,
            "help": "resume from the newest checkpoint in train.output_dir or from =step-N; =auto starts"
            " a new run if there is no checkpoint and does nothing if the run is finished",
        },
    ),
    (
        "--until",
        {
            "metavar": "WHEN",
            "type": arguments.until,
            "help": "save and exit with 75 before this time (7h30m, 06:30, 2026-11-22T06:30) or step (500)",
        },
    ),
    ("--verbose", {"action": "store_true", "help": "also print the table of run checks"}),
    ("--dry-run", {"action": "store_true", "help": "read the data and plan the run, but do not train"}),
)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train a recipe. Write a run: a folder with weights and evaluation."""
    from finetune.core.console import Console, quieten_libraries
    from finetune.export import after_training
    from finetune.launch import launcher
    from finetune.planning import planner
    from finetune.preflight import checker, choice_checks, publish_target
    from finetune.run_folder import run_folder

    main = launch_environment.is_main()
    with counted(options.recipe, quiet=options.quiet):
        recipe = load(options)
        with located(recipe):
            notes = checker.check_without_examples(recipe) + publish_target.check_recipe(recipe)
    with located(recipe):
        if options.dry_run:
            from finetune.cli import dry_run

            return dry_run.run(options, recipe, notes) if main else {}
        if options.accelerate:
            choice_checks.pinned(recipe)  # for the processes of the launch; else the plan pins the commit
        again = arguments.train_again(options) + arguments.flags(options)
        launcher.if_needed(again, functools.partial(planner.launch_of, recipe), options.accelerate)
        if main and recipe.publish.repo:
            notes += after_training.check(recipe.publish, recipe.model.name)
        if main and not options.quiet:
            of_modules = "adapter.target_modules: "  # the run says these notes of the loaded model
            Console().note(*(note for note in notes if not note.startswith(of_modules)))
        quieten_libraries()

        with fast_imports(quiet=options.quiet):
            from finetune.training import pipeline

        where = recipe.train.output_dir
        # A finished run does not change, so it is not published again.
        finished = where is not None and run_folder.RunFolder(Path(where)).finished
        requested: dict[str, Any] = {"resumes": options.resume, "until": options.until}
        try:
            folder = pipeline.run(recipe, verbosity=_verbosity(options), command=True, **requested)
        except Stopped as stopped:
            raise arguments.with_command(stopped, options) from None
        if main and not (finished and (folder.path / "publish.json").exists()):
            after_training.publish_run(recipe.publish, folder, Console(quiet=options.quiet))
        return _result(folder) if main and options.json else {}


def _verbosity(options: argparse.Namespace) -> Verbosity:
    return "quiet" if options.quiet else "verbose" if options.verbose else "normal"


def _result(folder: RunFolder) -> dict[str, Any]:
    """Return the result of `finetune train --json`."""
    checks = folder.read("checks.json")
    return {
        "run": folder.path,
        "evaluation": folder.read("eval.json"),
        "run_checks": {"passed": sum(check["passed"] for check in checks), "total": len(checks)},
        "report": folder.path / "report.html",
    }
