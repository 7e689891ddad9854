"""`finetune tune` as it was asked for: where things are, and what has to be installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from finetune import shipped, upstream
from finetune.errors import Exit, Problem, UserError
from finetune.given import writing

if TYPE_CHECKING:
    import argparse

URL = "FINETUNE_STORAGE"  # so that no list of processes shows a password


def run(options: argparse.Namespace) -> None:
    """Search, or write the space as a W&B sweep.

    Raises:
        UserError: Optuna is not installed (exit 3), the folder can't be made (2); and as `tune` does.
    """
    path = options.space or str(shipped.folder("recipes") / "tune.yaml")
    folder = Path(options.output or f"runs/tune-{Path(options.recipe).stem}")
    if options.export_wandb:
        export(options, Path(path), Path(options.export_wandb))
        return
    if not upstream.installed("optuna"):
        problem = Problem("needs optuna, which is not installed", fix="pip install 'finetune-toolkit[tune]'")
        raise UserError(problem, code=Exit.ENVIRONMENT)
    if (folder / "recipe.resolved.yaml").exists():
        what, fix = "a search needs a folder of its own", "--output runs/my-search"
        raise UserError(Problem(what, where=str(folder), found="is a run folder", fix=fix))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    from finetune import tune

    url = options.storage or os.environ.get(URL) or f"sqlite:///{folder.resolve()}/study.db"
    seconds = options.hours * 3600 if options.hours is not None else None
    limits = options.trials, seconds
    more = {"accelerate": options.accelerate, "final": options.final}
    asked = tune.Asked(options.recipe, options.overrides, Path(path), folder, *limits, url, **more)
    tune.run(asked, quiet=options.quiet)


def export(options: argparse.Namespace, path: Path, target: Path) -> None:
    """Write the space as a W&B sweep, its corners checked; neither Optuna nor wandb is needed.

    Raises:
        UserError: what a search would refuse as well, but for what only this machine can't run (exit 2).
    """
    from finetune import sweep, tune_check, tune_space
    from finetune.recipe import load
    from finetune.screen import Screen, quieten_libraries

    quieten_libraries()
    space, recipe = tune_space.read(path), load(options.recipe, options.overrides)
    tune_check.comparable(recipe)
    lacking = tune_check.corners(options.recipe, options.overrides, recipe, space)
    counted = recipe.eval.every is None and recipe.train.max_steps is None
    rows = tune_check.rows_of(recipe)[0] if counted else None
    text, notes = sweep.sweep(space, recipe, options.recipe, options.overrides, rows)
    notes += [f"{key}: not here: {one}: {why}" for key, gone in lacking.items() for one, why in gone.items()]
    with writing(target):
        target.write_text(text, encoding="utf-8")
    screen = Screen(quiet=options.quiet)
    screen.say(*[f"note: {note}" for note in notes], f"wrote {target}", f"next: wandb sweep {target}")
