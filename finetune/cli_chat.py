"""`finetune chat`: talk to the base model and the fine-tuned model."""

from __future__ import annotations

import argparse
from typing import Any

from finetune import arguments
from finetune.given import opened

CHAT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--prompt", {"metavar": "TEXT", "help": "ask this, and end"}),
    (
        "--max-new-tokens",
        {"metavar": "N", "type": arguments.at_least_one, "default": 512, "help": "longest answer: 512"},
    ),
    (
        "--temperature",
        {"metavar": "T", "type": arguments.at_least_zero, "default": 0.0, "help": "0, which is greedy"},
    ),
)


def chat(options: argparse.Namespace) -> None:
    """Talk to a run's base and tuned model side by side."""
    from rich.console import Console

    from finetune.screen import quieten_libraries

    run = opened(options)
    quieten_libraries()
    from finetune import chat as finetune_chat

    given = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    finetune_chat.run(run.path, Console(highlight=False), options.overrides, prompt=options.prompt, **given)
