"""`finetune merge`: merge an adapter into its base model."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import opened
from finetune.core import packages

MERGE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--dtype",
        {
            "choices": ["bfloat16", "float32"],
            "default": "bfloat16",
            "help": "dtype of the saved weights (default: bfloat16)",
        },
    ),
    (
        "--quantize",
        {
            "choices": ["int8", "int4", "fp8"],
            "help": "quantize the weights of linear layers with torchao, for transformers. For llama.cpp and "
            "other servers, use `finetune export`",
        },
    ),
    (
        "--output",
        {
            "metavar": "DIR",
            "help": "a new folder (default: RUN/merged, or RUN/merged-int8 with --quantize int8)",
        },
    ),
)


def merge(options: argparse.Namespace) -> dict[str, Any]:
    """Merge the adapter into the base model. Quantize it if you ask."""
    from finetune.core import progress
    from finetune.core.console import Console, quieten_libraries

    if options.quantize:
        packages.require("torchao", "quantize", "--quantize needs torchao")
    run = opened(options)
    quieten_libraries()
    with fast_imports(quiet=options.quiet):
        from finetune.export import merge_report, merging

    given = {"dtype": options.dtype, "quantized": options.quantize, "output": options.output}
    screen = Console(quiet=options.quiet)
    with progress.phase(screen, "merge"):
        merged = merging.run(run.path, options.overrides, **given)
    merge_report.show(screen, merged)
    return merged
