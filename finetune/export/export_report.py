"""Print the result of an export."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.core.console import Console


def show(screen: Console, report: dict[str, Any]) -> None:
    """Print the files, the serving check and the command that serves the model."""
    sizes = [(name, f"{size / 1e6:.1f} MB") for name, size in report["files"].items()]
    lines = [("folder", report["path"]), ("weights", report["quantize"]), *sizes]
    screen.table(f"export to {report['target']}", ("", ""), lines)
    for note in report.get("notes", ()):
        screen.say(f"note: {note}")
    screen.table("serving check", ("", ""), check_lines(report["serving_check"]))
    screen.say("", f"next: cd {shlex.quote(report['path'])} and serve the model:")
    for line in report["serve"]:
        screen.say(f"  {line}")
    if client := report.get("client"):
        screen.say("", "ask the server:", *(f"  {line}" for line in client))


def check_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the serving check, each with what was compared or why it was not."""
    if not found.get("reader"):
        return [("not run", found.get("not_run", ""))]
    ids, stops = found["token_ids"], found["stop_tokens"]
    lines = [("reader", found["reader"])]
    equal = f"{ids.get('prompts')} prompts, {ids.get('different')} differ"
    lines += [("token ids", f"not run: {ids['not_run']}" if "not_run" in ids else equal)]
    lines += [("stop tokens", f"not run: {stops['not_run']}" if "not_run" in stops else "all present")]
    lines += [("answers", _answers(found["answers"])), ("validation loss", _losses(found["loss"]))]
    return lines


def _answers(said: dict[str, Any]) -> str:
    if "not_run" in said:
        return f"not run: {said['not_run']}"
    shift = f"largest difference {said['largest_difference']:.2g}, allowed {said['tolerance']:.2g}"
    return f"{said['prompts']} prompts, {said['tokens']} tokens: {shift} (log-prob)"


def _losses(said: dict[str, Any]) -> str:
    if "not_run" in said:
        return f"not run: {said['not_run']}"
    both = f"{said['runtime']:.4f}, in finetune {said['finetune']:.4f}, allowed ±{said['tolerance']:.2g}"
    return f"{both} (nats per token, {said['tokens']:,} tokens)"
