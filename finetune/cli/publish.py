"""`finetune publish`: upload a run to the Hub."""

from __future__ import annotations

import argparse
import json
from typing import Any

from finetune.cli.inputs import opened

PUBLISH: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--dry-run",
        {"action": "store_true", "help": "show the files that would be uploaded, without the network"},
    ),
    (
        "--merged",
        {"action": "store_true", "help": "publish the result of `finetune merge` instead of the adapter"},
    ),
    ("--repo", {"metavar": "ID", "help": "repository organization/name (default: publish.repo)"}),
    (
        "--public",
        {"action": "store_true", "help": "make the repository public, as publish.private=false does"},
    ),
)


def publish(options: argparse.Namespace) -> dict[str, Any]:
    """Upload a run's result to the Hugging Face Hub. Private by default."""
    from finetune.core.console import Console
    from finetune.export import publishing

    overrides = [*options.overrides, *[f"publish.repo={json.dumps(options.repo)}"] * bool(options.repo)]
    overrides += ["publish.private=false"] if options.public else []
    screen, switches = Console(quiet=options.quiet), {"merged": options.merged, "dry_run": options.dry_run}
    return publishing.run(opened(options).path, screen, overrides, **switches)
