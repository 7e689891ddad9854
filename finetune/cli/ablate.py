"""`finetune ablate`: measure each optimization alone and together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune.cli.inputs import load, located

ABLATE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--optimizations", {"metavar": "FILE", "help": "the optimizations (default: recipes/ablation.yaml)"}),
    (
        "--output",
        {"metavar": "DIR", "default": "results", "help": "results; started again, it goes on there"},
    ),
)


def ablate(options: argparse.Namespace) -> None:
    """Measure each optimization on a recipe, alone and on top of the optimizations that helped."""
    with located(load(options)):
        from finetune.experiments.ablation import ablation

        file = Path(options.optimizations) if options.optimizations else ablation.default_ladder()
        asked = ablation.Asked(options.recipe, options.overrides, file, Path(options.output))
        ablation.run(asked, quiet=options.quiet)
