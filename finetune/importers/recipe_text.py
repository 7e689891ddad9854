"""The YAML text of an imported recipe, with the fate of every key as comments."""

from __future__ import annotations

import json

from finetune.core.privacy import masked, secrets
from finetune.core.visible_text import visible
from finetune.importers.translation import DIFFERS, KINDS, NOT_SUPPORTED, Entry, Translation

SECTIONS = ("model", "data", "adapter", "speed", "train", "eval", "publish")
LONGEST = 100  # characters of a value in a comment


def write(state: Translation, source: str) -> str:
    """Return the recipe and the four lists of keys."""
    known = secrets()
    lines = [f"# Imported from {state.tool}: {_line(source, known)}"]
    for kind in KINDS:
        entries = [entry for entry in state.entries if entry.kind == kind]
        lines += ["#", f"# {kind} ({len(entries)}):"] if entries else []
        lines += [f"#   {_said(entry, known)}" for entry in entries]
    for section in SECTIONS:
        values = {
            key.partition(".")[2]: value
            for key, value in state.recipe.items()
            if key.startswith(f"{section}.")
        }
        if values:
            lines += [
                "",
                f"{section}:",
                *(f"  {key}: {_yaml(value, known)}" for key, value in values.items()),
            ]
    return "\n".join(lines) + "\n"


def summary(state: Translation) -> list[str]:
    """Return the counts, and each key that finetune does not support or that has another default."""
    counts = {kind: sum(entry.kind == kind for entry in state.entries) for kind in KINDS}
    lines = [", ".join(f"{count} {kind}" for kind, count in counts.items())]
    for kind in (DIFFERS, NOT_SUPPORTED):
        lines += [f"{kind}: {entry.key}: {entry.text}" for entry in state.entries if entry.kind == kind]
    return lines


def _said(entry: Entry, known: list[str]) -> str:
    value = _line(entry.value, known)
    short = value if len(value) <= LONGEST else f"{value[:LONGEST]}..."
    return f"{_line(entry.key, known)}: {short} -> {_line(entry.text, known)}"


def _line(text: object, known: list[str]) -> str:
    """Return a text of another tool's file as one line without secrets."""
    return visible(masked(" ".join(str(text).split()), known))


def _yaml(value: object, known: list[str]) -> str:
    """Return a value in YAML's flow style, which JSON is a part of, without secrets."""
    return visible(masked(json.dumps(value, ensure_ascii=False), known))
