"""`finetune data`: show examples as the model will see them."""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from finetune.cli import arguments
from finetune.cli.inputs import load, located
from finetune.core.command_lines import next_step
from finetune.core.errors import Problem, UserError
from finetune.core.paths import writing

DATA: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--show",
        {
            "metavar": "N",
            "type": arguments.count,
            "help": "number of examples to show (default: 3, or 20 with --html)",
        },
    ),
    ("--html", {"metavar": "FILE", "help": "write an HTML page with the audit, plots and examples"}),
    (
        "--prepare",
        {"metavar": "DIR", "help": "store the prepared data in this folder, as data.cache_dir=DIR does"},
    ),
)


def data(options: argparse.Namespace) -> dict[str, Any]:
    """Show examples token by token, and which tokens are trained on."""
    from finetune.core import progress
    from finetune.core.console import Console, quieten_libraries
    from finetune.preflight import checker
    from finetune.recipe import command_line_overrides
    from finetune.training import load_data

    if options.prepare is not None:
        options.overrides.append(command_line_overrides.of_path("data.cache_dir", options.prepare))
    recipe = load(options)
    page = Path(options.html) if options.html is not None else None
    with located(recipe):
        checker.check_without_examples(recipe, with_weights=False)
        if options.prepare is not None and recipe.data.streaming:
            raise UserError(
                Problem(
                    "--prepare can't prepare a stream, which is read during training",
                    "data.streaming",
                    found="true",
                    fix="data.streaming: false",
                    code="command-line",
                )
            )
        kept = [Path(recipe.data.cache_dir)] if options.prepare and recipe.data.cache_dir else []
        for folder in [*kept, *([page.parent] if page else [])]:
            with writing(folder):  # fail before the work, not after it
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        quieten_libraries()
        screen = Console(quiet=options.quiet)
        with progress.phase(screen, "preparing the data"):
            tokenizer, prepared = load_data.prepare_data(recipe)
    from finetune.data import preview

    if isinstance(sys.stdout, io.TextIOWrapper):  # data may have characters that the terminal can't encode
        sys.stdout.reconfigure(errors="backslashreplace")
    unasked = 0 if page or kept else 3
    preview.summary(screen, prepared)
    preview.show(screen, tokenizer, prepared, unasked if options.show is None else options.show)
    if page:
        with writing(page):
            length = recipe.data.max_length
            preview.write_html(page, tokenizer, prepared, options.recipe, length, options.show)
        screen.say("", f"wrote {page}")
    if not options.json:
        then = "train" if kept else "plan"
        screen.say("", next_step(then, options.recipe, *options.overrides))
    return {name: report.as_json() for name, report in prepared.report.items()}
