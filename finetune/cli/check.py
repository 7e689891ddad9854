"""`finetune check`: find every mistake in a recipe before a weight is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import counted, load, located
from finetune.core import standard_streams
from finetune.core.command_lines import next_step
from finetune.core.errors import UserError
from finetune.core.formatting import labelled

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

CHECK: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--verify-resume",
        {
            "action": "store_true",
            "help": "train a few steps, stop, resume, and compare the results bit by bit (about a minute)",
        },
    ),
    (
        "--rehearse",
        {
            "action": "store_true",
            "help": "train three steps, kill the run, resume, evaluate and publish to a local folder",
        },
    ),
)


def _decided(recipe: Recipe) -> list[str]:
    """Return the errors of `autoconfig.decide` about `speed:` for this model on this machine, as notes.

    Only settings that the recipe sets can be wrong, so most recipes need no torch here.
    """
    speed = recipe.speed
    values = speed.fused, speed.compile, speed.activation_checkpointing, speed.offload
    if all(value in ("auto", "none", False) for value in values) or not Path(recipe.model.name).is_dir():
        return []
    from finetune.planning import planner
    from finetune.preflight import checker

    try:
        planner.make_for(recipe, None, None)
    except UserError as error:
        return checker.refused_here(error)
    return []


def check(options: argparse.Namespace) -> dict[str, Any]:
    """Find mistakes in a recipe and in its first examples. Trains nothing."""
    from finetune.data import template_sandbox

    template_sandbox.start()  # it starts during the imports and the other checks
    with counted(options.recipe, quiet=options.quiet):
        with fast_imports(quiet=options.quiet):
            from finetune.data import source_loading
            from finetune.preflight import checker

            recipe = load(options)
        with located(recipe):
            notes = checker.check(recipe)
            notes = list(dict.fromkeys([*notes, *_decided(recipe)]))
            sources = [source_loading.title(source) for source in source_loading.sources(recipe.data)]
    if not options.quiet:
        what = f"{recipe.adapter.type} on {recipe.model.name} with {', '.join(sources)}"
        standard_streams.say(*map(labelled, notes), f"fine: {options.recipe}: {what}")
    if options.verify_resume or options.rehearse:
        from finetune.core.console import Console
        from finetune.experiments.runner import rehearsal, verify_resume

        prove_it = rehearsal.run if options.rehearse else verify_resume.run
        prove_it(recipe, [options.recipe, *options.overrides], Console(quiet=options.quiet))
    if not (options.quiet or options.json):
        then = "train" if options.verify_resume or options.rehearse else "data"
        standard_streams.say(next_step(then, options.recipe, *options.overrides))
    return {"notes": notes}
