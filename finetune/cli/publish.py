"""`finetune publish`: upload a run to the Hub."""

from __future__ import annotations

import argparse
import json
from typing import Any

from finetune.cli.inputs import opened

PUBLISH: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--dry-run", {"action": "store_true", "help": "show what would go up; asks no one"}),
    ("--merged", {"action": "store_true", "help": "what `finetune merge` left, in place of the adapter"}),
    ("--repo", {"metavar": "ID", "help": "organisation/name: publish.repo"}),
    ("--public", {"action": "store_true", "help": "publish.private=false"}),
)


def publish(options: argparse.Namespace) -> dict[str, Any]:
    """Publish a run to the Hub, privately unless asked: weights, card, results."""
    from finetune.core.console import Console
    from finetune.export import publishing

    overrides = [*options.overrides, *[f"publish.repo={json.dumps(options.repo)}"] * bool(options.repo)]
    overrides += ["publish.private=false"] if options.public else []
    screen, asked = Console(quiet=options.quiet), {"merged": options.merged, "dry_run": options.dry_run}
    return publishing.run(opened(options).path, screen, overrides, **asked)
