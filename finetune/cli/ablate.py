"""`finetune ablate`: measure each optimization alone and together."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from finetune.cli.inputs import load, located

ABLATE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--optimizations",
        {"metavar": "FILE", "help": "file of the optimizations (default: recipes/ablation.yaml)"},
    ),
    (
        "--output",
        {
            "metavar": "DIR",
            "help": "output folder (default: runs/ablate-RECIPE); an interrupted ablation continues there",
        },
    ),
)


def ablate(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the speed and memory that each optimization gains."""
    with located(load(options)):
        from finetune.experiments.ablation import ablation, optimizations

        file = Path(options.optimizations) if options.optimizations else optimizations.default_optimizations()
        folder = Path(options.output or f"runs/ablate-{Path(options.recipe).stem}")
        request = ablation.AblationRequest(options.recipe, options.overrides, file, folder)
        return ablation.run(request, quiet=options.quiet)
