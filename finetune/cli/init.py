"""`finetune init`: write a recipe."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from finetune.core import safe_files, standard_streams
from finetune.core.command_lines import command, next_step
from finetune.core.errors import Problem, UserError, nearest
from finetune.core.formatting import labelled
from finetune.core.paths import free_name, writing

# option -> question, default
QUESTIONS = {
    "model": ("Model: a folder, or a name on the Hub", ""),
    "data": ("Training data: a file, a folder, or a dataset on the Hub", ""),
    "validation": ("Validation set: a file, or a share of the data", "0.1"),
    "adapter": ("Method: lora, qlora, dora, adalora, ia3 or full", "lora"),
    "output": ("Write the recipe to", "recipe.yaml"),
}
INIT: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (f"--{name}", {"metavar": name.upper(), "help": question + (f" (default: {default})" if default else "")})
    for name, (question, default) in QUESTIONS.items()
)


def init(options: argparse.Namespace) -> dict[str, Any]:
    """Write a recipe from your answers to five questions, or from options."""
    given = _answers(options)
    from finetune.preflight import checker
    from finetune.recipe import adapter_types, loader, new_recipe

    path = Path(given.pop("output"))
    if path.exists():
        raise UserError(
            Problem(
                "the recipe exists",
                where=str(path),
                fix=f"--output {free_name(path.with_suffix(''))}.yaml",
                why="finetune overwrites no files",
                code="path",
            )
        )
    answers = new_recipe.Answers(**given)
    if answers.adapter not in adapter_types.all_types():
        near = nearest(answers.adapter, adapter_types.all_types())
        raise UserError(
            Problem(
                "no such adapter type",
                found=answers.adapter,
                fix=f"--adapter {near or 'lora'}",
                code="adapter-type",
            )
        )
    length = _max_length(answers.model)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_text(path.parent, path.name, new_recipe.write(answers, str(path), max_length=length))
    try:
        notes = checker.check(loader.load(path))
    except UserError as error:
        columns = _guessed_columns(error)
        if not columns:
            standard_streams.say(
                f"wrote {path}; check it after each correction: {command('check', str(path))}"
            )
            raise
        safe_files.write_text(path.parent, path.name, new_recipe.write(answers, str(path), columns, length))
        notes = [
            f"the names of the columns suggest data.{columns}. Correct it if it is wrong",
            *checker.check(loader.load(path)),
        ]
    standard_streams.say(f"wrote {path}")
    if not options.quiet:
        standard_streams.say(*map(labelled, notes), next_step("train", str(path)))
    return {"recipe": path, "notes": notes}


def _max_length(model: str) -> int:
    """Return `data.max_length`: that of every new recipe, or less if a local model has fewer positions."""
    from finetune.models import architecture, token_limits
    from finetune.recipe import new_recipe

    config = Path(model) / "config.json"
    try:
        longest = token_limits.positions(architecture.config_in(config)) if config.exists() else None
    except UserError:  # the check of the recipe reports it
        longest = None
    return min(longest or new_recipe.MAX_LENGTH, new_recipe.MAX_LENGTH)


def _guessed_columns(error: UserError) -> str:
    """Return the line for `data.columns` that an error suggests, if the columns are the only problem."""
    fixes = {problem.fix for problem in error.problems if problem.key == "data.columns"}
    fix = fixes.pop() if len(fixes) == 1 and len(error.problems) == 1 else ""
    return fix if fix.startswith("columns: {") and fix.endswith("}") and "..." not in fix else ""


def _ask(question: str) -> str:
    """Return what a person types. Ctrl-D ends the command as Ctrl-C does."""
    try:
        return input(question).strip()
    except EOFError:
        standard_streams.say("")
        raise KeyboardInterrupt from None


def _answers(options: argparse.Namespace) -> dict[str, str]:
    """Return the answers from the options. Ask for missing ones on a terminal, else use the defaults."""
    given = {name: getattr(options, name) for name in QUESTIONS}
    if sys.stdin.isatty() and not all(given.values()):
        for name, (question, default) in QUESTIONS.items():
            while not given[name]:
                given[name] = _ask(f"{question}{f' [{default}]' if default else ''}: ") or default
    missing = [name for name, (_, default) in QUESTIONS.items() if not (given[name] or default)]
    if missing:
        raise UserError(
            Problem(
                f"{' and '.join(f'--{name}' for name in missing)} must be given without a terminal",
                fix=command("init", *(word for name in missing for word in (f"--{name}", name.upper()))),
                code="command-line",
            )
        )
    return {name: given[name] or default for name, (_, default) in QUESTIONS.items()}
