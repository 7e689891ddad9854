"""`finetune import`: translate a config of axolotl, LLaMA-Factory or TRL into a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.cli import arguments
from finetune.core import safe_files, standard_streams
from finetune.core.command_lines import command, next_step
from finetune.core.errors import Problem, UserError
from finetune.core.paths import writing

if TYPE_CHECKING:
    from finetune.importers.translation import Translation
    from finetune.importers.verify import Verified

IMPORT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("file", {"metavar": "FILE", "help": "a YAML config, or a shell script with `trl sft ...`"}),
    (
        "--from",
        {
            "dest": "tool",
            "choices": ("axolotl", "llamafactory", "trl"),
            "help": "the tool that the file is for (default: found by its keys)",
        },
    ),
    (
        "--gpus",
        {
            "metavar": "N",
            "type": arguments.number_of_gpus,
            "default": 1,
            "help": "GPUs that the tool trained on",
        },
    ),
    (
        "--verify",
        {
            "action": "store_true",
            "help": "compare the token ids and labels of the first batch with the tool's (needs the data)",
        },
    ),
    ("--output", {"metavar": "FILE", "default": "recipe.yaml", "help": "the recipe (default: recipe.yaml)"}),
)


def import_recipe(options: argparse.Namespace) -> dict[str, Any]:
    """Translate a config of axolotl, LLaMA-Factory or TRL into a recipe."""
    from finetune.importers import reading, recipe_text

    path = Path(options.output)
    if path.exists():
        raise UserError(Problem(f"{path} exists", fix="--output with another name", code="path"))
    state = reading.import_recipe(options.file, options.tool, options.gpus)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_text(path.parent, path.name, recipe_text.write(state, options.file))
    compared = _compare(state, path) if options.verify else None
    launched = ["--accelerate", state.accelerate] if state.accelerate else []
    if not options.quiet:
        standard_streams.say(f"wrote {path}, translated from {state.tool}", *recipe_text.summary(state))
        standard_streams.say(*(compared.lines() if compared else ()))
        standard_streams.say(
            next_step("check", str(path)), f"then, train: {command('train', str(path), *launched)}"
        )
    return {
        "recipe": path,
        "tool": state.tool,
        "accelerate": state.accelerate or None,
        "keys": state.entries,
        "verify": compared,
    }


def _compare(state: Translation, path: Path) -> Verified:
    """Compare the first batch of the recipe that was written."""
    from finetune.importers import verify
    from finetune.recipe import loader

    return verify.verify(state, loader.load(path))
