"""Open the recipe or run folder that a command gets, and add file positions to errors."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.cli import arguments
from finetune.core import argument_types, privacy, standard_streams, strict_yaml
from finetune.core.command_lines import command
from finetune.core.errors import UserError
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from finetune.core.errors import Problem
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder


def load(options: argparse.Namespace) -> Recipe:
    from finetune.recipe.loader import load as load_recipe

    return load_recipe(options.recipe, options.overrides)


def opened(options: argparse.Namespace) -> RunFolder:
    """Open the run that a command gets. For a run on the Hub, print its local folder."""
    from finetune.run_folder.run_folder import open_run

    argument_types.check_read(arguments.command_name(options.command), getattr(options, "overrides", []))
    run = open_run(options.run)
    if str(run.path) != str(Path(options.run)) and not options.quiet and launch_environment.is_main():
        standard_streams.say(f"note: {options.run} is in {run.path}; what is made of it goes there")
    return run


@contextlib.contextmanager
def located(recipe: Recipe | None) -> Iterator[None]:
    """Add file:line:column to every problem with a recipe key."""
    try:
        yield
    except UserError as error:
        if recipe is None:
            raise
        problems = [dataclasses.replace(p, where=p.where or place(recipe, p.key)) for p in error.problems]
        raise UserError(*problems, code=error.code) from error


@contextlib.contextmanager
def counted(recipe: str, *, quiet: bool) -> Iterator[None]:
    """Add the last lines to the errors of a recipe, unless `quiet`: their number, and what to do next."""
    try:
        yield
    except UserError as error:
        code = next((problem.code for problem in error.problems if problem.key), "")
        if code and not quiet:
            count = len(error.problems)
            errors, them = ("errors", "them") if count > 1 else ("error", "it")
            again = command("check", recipe)
            error.add_note(f"{count} {errors}; nothing was started. Correct {them}, then run: {again}")
            error.add_note(f"more about a code in brackets: {command('explain', code)}")
        raise


def with_lines(problems: Iterable[Problem]) -> list[Problem]:
    """Add the line of the YAML file to each problem, unless the line has a secret."""
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
        line = "" if privacy.names_a_secret(line) else line
        shown.append(dataclasses.replace(problem, line=line, fix=_typed_fix(problem)))
    return shown


def _typed_fix(problem: Problem) -> str:
    """Return the fix of a problem. For an override, `type: lora` becomes `adapter.type=lora`."""
    name = problem.key.rpartition(".")[2]
    value = problem.fix.removeprefix(f"{name}: ")
    is_value = value != problem.fix and " " not in value
    is_override = problem.where.startswith("override ")
    return shlex.quote(f"{problem.key}={value}") if is_value and is_override else problem.fix


def _lines_of(path: Path) -> list[str]:
    try:
        return strict_yaml.text_of(path, "the recipe").split("\n")
    except (OSError, UserError):  # the file has changed, or the path is not a file
        return []


def place(recipe: Recipe, key: str) -> str:
    """Return the position of a dotted key or of its section in the recipe."""
    path = tuple(key.split(".")) if key else ()
    while path and path not in recipe.origin.where:
        path = path[:-1]
    return recipe.origin.where.get(path, "") if path else ""
