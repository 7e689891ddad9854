"""`finetune check`: find every mistake in a recipe before a weight is loaded."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.given import load, located

CHECK: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--prove-resume",
        {
            "action": "store_true",
            "help": "train a few steps, stop, resume, and compare bit for bit: a minute",
        },
    ),
    (
        "--preflight",
        {
            "action": "store_true",
            "help": "a run's whole life in three steps: kill, resume, evaluate, publish",
        },
    ),
)


def check(options: argparse.Namespace) -> None:
    """Check a recipe, its files, its module names and the first rows of its data."""
    from finetune import check as finetune_check
    from finetune.data import bad_rows

    recipe = load(options)
    with located(recipe):
        notes = finetune_check.run(recipe) + bad_rows.first_rows(recipe.data)
    if not options.quiet:
        what = f"{recipe.adapter.type} on {recipe.model.name} with {recipe.data.name}"
        print(*(f"note: {note}" for note in notes), f"fine: {options.recipe}: {what}", sep="\n")
    if options.prove_resume or options.preflight:
        from finetune import preflight, prove
        from finetune.screen import Screen

        prove_it = preflight.run if options.preflight else prove.run
        prove_it(recipe, [options.recipe, *options.overrides], Screen(quiet=options.quiet))
