"""`finetune compare`: compare adapter types on one recipe, or two runs."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from finetune.cli import arguments
from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import load, located
from finetune.core.errors import Problem, UserError, raise_if_any

CODE = "command-line"


def second_run(options: argparse.Namespace) -> str:
    """Return the second of two run folders.

    Raises:
        UserError: there is not exactly one second folder, or an option needs a recipe (exit 2).
    """
    given = {
        "--adapters": options.adapters,
        "--seeds": options.seeds,
        "--budget": options.budget,
        "--output": options.output,
    }
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise UserError(
            Problem(
                f"{' and '.join(wrong)} can't be used to compare two runs",
                where=options.what,
                fix="finetune compare RECIPE --adapters lora,dora",
                code=CODE,
            )
        )
    if len(options.overrides) != 1 or "=" in options.overrides[0]:
        raise UserError(
            Problem(
                "to compare a run, name one other run",
                found=" ".join(options.overrides) or "no other run",
                fix="finetune compare RUN_A RUN_B",
                code=CODE,
            )
        )
    return options.overrides[0]


def compare_problems(options: argparse.Namespace) -> list[Problem]:
    """Return the problems of the options for a recipe."""
    problems, fix = [], "--adapters lora,dora,ia3"
    if options.adapters is None and Path(options.what).exists():
        problems.append(Problem("the adapter types to compare are missing", fix=fix, code=CODE))
    if options.assert_equal:
        problems.append(
            Problem(
                "--assert-equal needs two run folders",
                fix="finetune compare RUN_A RUN_B --assert-equal",
                code=CODE,
            )
        )
    return problems


def compare_again(options: argparse.Namespace) -> list[str]:
    """Return the command line for the processes of the launch."""
    named = [(f"--{name}", getattr(options, name)) for name in ("adapters", "seeds", "output")]
    named.append(("--budget", f"{options.budget}s" if options.budget else None))
    flat = [text for name, value in named if value is not None for text in (name, str(value))]
    return [options.what, *options.overrides, *flat]


COMPARE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("what", {"metavar": "RECIPE | RUN_A", "help": "a recipe file, or the first of two run folders"}),
    (
        "overrides",
        {
            "metavar": "key=value | RUN_B",
            "nargs": "*",
            "help": "recipe keys to override, or the second run folder",
        },
    ),
    (
        "--adapters",
        {
            "metavar": "TYPES",
            "type": arguments.names,
            "help": "adapter types, such as lora,dora,ia3; ia3@0.1 sets a learning rate for one type",
        },
    ),
    (
        "--seeds",
        {
            "metavar": "N",
            "type": arguments.number_of_seeds,
            "help": "runs per type, each with its own seed (default: 3)",
        },
    ),
    (
        "--budget",
        {
            "metavar": "TIME",
            "type": arguments.seconds,
            "help": "time for all runs, shared evenly, such as 30m or 2h",
        },
    ),
    (
        "--output",
        {
            "metavar": "DIR",
            "help": "output folder (default: runs/compare-RECIPE); an interrupted comparison continues there",
        },
    ),
    (
        "--assert-equal",
        {"action": "store_true", "help": "exit with 4 unless both runs learned the same weights"},
    ),
)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Compare adapter types on one recipe, or two finished runs."""
    from finetune.core.console import quieten_libraries

    what = Path(options.what)
    if what.is_dir() or ("@" in options.what and not what.exists()):  # or a run on the Hub
        other = second_run(options)
        from finetune.core.console import Console
        from finetune.experiments.comparison import run_diff

        screen = Console(quiet=options.quiet)
        parts = run_diff.run(options.what, other, screen, must_equal=options.assert_equal)
        return {"parts": {part.part: {"summary": part.summary, "rows": part.rows} for part in parts}}
    raise_if_any(compare_problems(options))
    recipe = load(argparse.Namespace(recipe=options.what, overrides=options.overrides))
    with located(recipe):
        from finetune.launch import launcher

        again = ["compare", *compare_again(options), *arguments.flags(options)]
        launcher.if_needed(again, functools.partial(launcher.data_parallel, recipe.train))
        quieten_libraries()
        with fast_imports(quiet=options.quiet):
            from finetune.experiments.comparison import comparison

        folder = Path(options.output or f"runs/compare-{Path(options.what).stem}")
        given = (options.what, options.overrides, options.adapters.split(","), options.seeds or 3)
        return comparison.run(
            comparison.ComparisonRequest(*given, options.budget, folder), quiet=options.quiet
        )
