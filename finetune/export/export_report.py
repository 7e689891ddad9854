"""Print the result of an export."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from finetune.core.formatting import file_size
from finetune.reporting import exports

if TYPE_CHECKING:
    from finetune.core.console import Console


def show(screen: Console, report: dict[str, Any]) -> None:
    """Print the files, the serving check and the command that serves the model."""
    sizes = [(name, file_size(size)) for name, size in report["files"].items()]
    lines = [("folder", report["path"]), ("weights", report["quantize"]), *sizes]
    screen.table(f"export to {report['target']}", ("", ""), lines)
    for note in report.get("notes", ()):
        screen.say(f"note: {note}")
    screen.table("serving check", ("", ""), exports.lines(report))
    screen.say("", "next:", f"  cd {shlex.quote(report['path'])}")
    for line in report["serve"]:
        screen.say(f"  {line}")
    if client := report.get("client"):
        screen.say("", "ask the server:", *(f"  {line}" for line in client))
