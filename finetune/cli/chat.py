"""`finetune chat`: talk to the base model and the fine-tuned model."""

from __future__ import annotations

import argparse
from typing import Any

from finetune.cli import arguments
from finetune.cli.fast_imports import fast_imports
from finetune.cli.inputs import opened
from finetune.core.errors import Problem, UserError

CHAT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--prompt", {"metavar": "TEXT", "help": "print the answers to this prompt and exit"}),
    (
        "--max-new-tokens",
        {
            "metavar": "N",
            "type": arguments.at_least_one,
            "default": 512,
            "help": "largest number of tokens in an answer (default: 512)",
        },
    ),
    (
        "--temperature",
        {
            "metavar": "T",
            "type": arguments.at_least_zero,
            "default": 0.0,
            "help": "sampling temperature (default: 0, greedy decoding)",
        },
    ),
)


def chat(options: argparse.Namespace) -> dict[str, Any]:
    """Chat with the base model and the fine-tuned model side by side."""
    from rich.console import Console

    from finetune.core.console import quieten_libraries

    if options.json and options.prompt is None:
        raise UserError(Problem("--json needs a prompt", fix="--prompt 'your question'", code="command-line"))
    run = opened(options)
    quieten_libraries()
    with fast_imports(quiet=options.quiet):
        from finetune.evaluation import chat_session

    answers = chat_session.run(
        run.path,
        Console(highlight=False),
        options.overrides,
        prompt=options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
    )
    return {"answers": answers}
