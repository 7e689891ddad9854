"""What a command is given: a recipe, a run folder, a place to write to; errors that say where they are."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import arguments
from finetune.core import privacy, standard_streams, strict_yaml
from finetune.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.core.errors import Problem
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder


def load(options: argparse.Namespace) -> Recipe:
    from finetune.recipe.loader import load as load_recipe

    return load_recipe(options.recipe, options.overrides)


def opened(options: argparse.Namespace) -> RunFolder:
    """The run of a command that takes one; of one from the Hub it is said where it is here."""
    from finetune.run_folder.run_folder import open_run

    arguments.check_read(arguments.command_name(options.command), getattr(options, "overrides", []))
    run = open_run(options.run)
    if str(run.path) != str(Path(options.run)) and not options.quiet and os.environ.get("RANK", "0") == "0":
        standard_streams.say(f"note: {options.run} is in {run.path}; what is made of it goes there")
    return run


@contextlib.contextmanager
def located(recipe: Recipe | None) -> Iterator[None]:
    """Give every problem that names a recipe key its file:line:col."""
    try:
        yield
    except UserError as error:
        if recipe is None:
            raise
        problems = [dataclasses.replace(p, where=p.where or place(recipe, p.key)) for p in error.problems]
        raise UserError(*problems, code=error.code) from error


def with_lines(problems: Iterable[Problem]) -> list[Problem]:
    """Problems with the line of the YAML file that each is about; a line with a secret is not shown."""
    texts: dict[str, list[str]] = {}
    shown = []
    for problem in problems:
        file, _, position = problem.where.partition(".yaml:")
        number = position.partition(":")[0]
        line = ""
        if number.isdecimal():
            file = f"{file}.yaml"
            if file not in texts:
                texts[file] = _lines_of(Path(file))
            line = "".join(texts[file][int(number) - 1 : int(number)])
        shown.append(dataclasses.replace(problem, line="" if privacy.names_a_secret(line) else line))
    return shown


def _lines_of(path: Path) -> list[str]:
    try:
        return strict_yaml.text_of(path, "the recipe").split("\n")
    except (OSError, UserError):  # the file has changed, or was no file
        return []


def place(recipe: Recipe, key: str) -> str:
    """Where a dotted key, or the section round it, stands in the recipe."""
    path = tuple(key.split(".")) if key else ()
    while path and path not in recipe.origin.where:
        path = path[:-1]
    return recipe.origin.where.get(path, "") if path else ""
