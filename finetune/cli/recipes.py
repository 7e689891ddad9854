"""`finetune recipes`: list the shipped recipes, or copy one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune.core import standard_streams
from finetune.core.command_lines import command, next_step
from finetune.core.errors import Problem, UserError

RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("name", {"metavar": "NAME", "nargs": "?"}),
    ("--copy", {"metavar": "TO", "help": "copy the recipe and the files that it needs to this folder"}),
)


def recipes(options: argparse.Namespace) -> dict[str, Any]:
    """List the shipped recipes. Print or copy one."""
    from finetune.core import paths, shipped_files
    from finetune.core.console import Console

    if options.name is None and options.copy is None:
        found = {name: shipped_files.purpose(path) for name, path in shipped_files.recipes().items()}
        screen = Console(quiet=options.quiet)
        screen.table("", ("recipe", "purpose"), list(found.items()))
        screen.say("", f"next, print one: {command('recipes', 'quickstart')}")
        return {"recipes": found}
    if options.name is None:
        raise UserError(
            Problem(
                "the name of the recipe is missing",
                fix=command("recipes", "quickstart", "--copy", options.copy),
                code="command-line",
            )
        )
    if options.copy is None:
        standard_streams.say(*shipped_files.text(options.name).rstrip("\n").split("\n"))
        return {"recipe": shipped_files.text(options.name)}
    with paths.writing(Path(options.copy)):
        written = shipped_files.copy(options.name, Path(options.copy))
    standard_streams.say(*(f"wrote {path}" for path in written))
    standard_streams.say(next_step("train", str(written[0])))
    return {"written": written}
