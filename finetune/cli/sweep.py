"""`finetune sweep`: search values of recipe keys with Optuna."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from finetune.cli import arguments
from finetune.cli.inputs import load, located
from finetune.core import packages, safe_files, shipped_files
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.paths import writing

URL = "FINETUNE_STORAGE"  # an environment variable, so that the process list shows no password


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the search, or write the search space as a W&B sweep.

    Raises:
        UserError: Optuna is not installed (exit 3), the folder can't be made (exit 2), or `sweep` fails.
    """
    path = options.space or str(shipped_files.folder("recipes") / "sweep.yaml")
    folder = Path(options.output or f"runs/sweep-{Path(options.recipe).stem}")
    if options.export_wandb:
        export(options, Path(path), Path(options.export_wandb))
        return {"wandb_sweep": options.export_wandb}
    if not packages.installed("optuna"):
        raise UserError(
            Problem(
                "`finetune sweep` needs optuna, which is not installed",
                fix=packages.install_extra("sweep"),
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        )
    if (folder / "recipe.resolved.yaml").exists():
        raise UserError(
            Problem(
                "a sweep can't use the folder of a run",
                where=str(folder),
                fix="--output runs/my-sweep",
                code="experiment",
            )
        )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    from finetune.experiments.sweep import search_space_checks, study

    url = options.storage or os.environ.get(URL) or f"sqlite:///{folder.resolve()}/study.db"
    seconds = options.hours * 3600 if options.hours is not None else None
    limits = options.trials, seconds
    request = search_space_checks.SweepRequest(
        options.recipe,
        options.overrides,
        Path(path),
        folder,
        *limits,
        url,
        accelerate=options.accelerate,
        final=options.final,
    )
    return study.run(request, quiet=options.quiet)


def export(options: argparse.Namespace, path: Path, target: Path) -> None:
    """Check the corners of the search space, and write it as a W&B sweep. Needs neither Optuna nor wandb.

    Raises:
        UserError: the search space has an error (exit 2). Limits of this machine are not errors here.
    """
    from finetune.core.console import Console, quieten_libraries
    from finetune.experiments.sweep import search_space, search_space_checks, wandb_sweep
    from finetune.recipe.loader import load

    quieten_libraries()
    space, recipe = search_space.read(path), load(options.recipe, options.overrides)
    search_space_checks.comparable(recipe)
    lacking = search_space_checks.corners(options.recipe, options.overrides, recipe, space)
    counted = not isinstance(recipe.eval.eval_steps, int) and recipe.train.max_steps is None
    rows = search_space_checks.rows_of(recipe)[0] if counted else None
    text, notes = wandb_sweep.sweep(space, recipe, options.recipe, options.overrides, rows)
    notes += [f"{key}: not here: {one}: {why}" for key, gone in lacking.items() for one, why in gone.items()]
    with writing(target):
        safe_files.write_text(target.parent, target.name, text)
    screen = Console(quiet=options.quiet)
    screen.say(*[f"note: {note}" for note in notes], f"wrote {target}", f"next: wandb sweep {target}")


SWEEP: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--space",
        {"metavar": "FILE", "help": "file of the search space (default: the shipped recipes/sweep.yaml)"},
    ),
    (
        "--trials",
        {
            "metavar": "N",
            "type": arguments.at_least_one,
            "help": "number of trials, over all restarts and workers (default: 20)",
        },
    ),
    (
        "--hours",
        {
            "metavar": "H",
            "type": arguments.at_least_zero,
            "help": "time limit of this command, which stops the running trial",
        },
    ),
    (
        "--storage",
        {
            "metavar": "URL",
            "help": "storage for several workers: postgresql://user@host/database, mysql+pymysql://... or"
            " journal:FILE (default: $FINETUNE_STORAGE, which hides passwords, or a file in the folder)",
        },
    ),
    (
        "--output",
        {
            "metavar": "DIR",
            "help": "output folder (default: runs/sweep-RECIPE); its name names the study",
        },
    ),
    ("--accelerate", {"metavar": "FILE", "help": "accelerate config for the trials"}),
    (
        "--final",
        {"action": "store_true", "help": "train the best recipe to its end after the search, into DIR/final"},
    ),
    ("--export-wandb", {"metavar": "FILE", "help": "write the search space as a W&B sweep file and exit"}),
)


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Search the best values of recipe keys with Optuna."""

    with located(load(options)):
        return run(options)
