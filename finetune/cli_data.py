"""`finetune data`: show examples as the model will see them."""

from __future__ import annotations

import argparse
import io
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from finetune import arguments
from finetune.core_paths import writing
from finetune.errors import Problem, UserError
from finetune.given import load, located

DATA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--show", {"metavar": "N", "type": arguments.count, "help": "rows to show: 3; with --html 20"}),
    ("--html", {"metavar": "FILE", "help": "write a page with the audit, plots and rows"}),
    ("--prepare", {"metavar": "DIR", "help": "keep the prepared data there: data.cache=DIR"}),
)


def data(options: argparse.Namespace) -> None:
    """Show what will be trained on, token by token."""
    from finetune import check, training_training_data
    from finetune.screen import Screen, quieten_libraries

    if options.prepare is not None:
        options.overrides.append(f"data.cache={options.prepare}")
    recipe = load(options)
    page = Path(options.html) if options.html is not None else None
    with located(recipe):
        check.run(recipe)
        if options.prepare is not None and recipe.data.streaming:
            raise UserError(Problem("a stream is prepared while training", "data.streaming", fix="false"))
        kept = [Path(recipe.data.cache)] if options.prepare and recipe.data.cache else []
        for folder in [*kept, *([page.parent] if page else [])]:
            with writing(folder):  # known before the work, not after it
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        quieten_libraries()
        tokenizer, prepared = training_training_data.prepare_data(recipe)
    from finetune.data import view

    if isinstance(sys.stdout, io.TextIOWrapper):  # data may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    screen, unasked = Screen(quiet=options.quiet), 0 if page or kept else 3
    view.summary(screen, prepared)
    view.show(screen, tokenizer, prepared, unasked if options.show is None else options.show)
    if page:
        with writing(page):
            length = recipe.data.max_length
            view.write_html(page, tokenizer, prepared, options.recipe, length, options.show)
        screen.say("", f"wrote {page}")
    if kept:
        screen.say("", f"next: {shlex.join(['finetune', 'train', options.recipe, *options.overrides])}")
