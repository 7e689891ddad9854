"""The fields of `--json` that docs/reference/json_output.md names."""

from __future__ import annotations

import re

from support.paths import ROOT


def documented_fields(command: str) -> set[str]:
    """Return the names in the row of a command: a code span without a space, outside of brackets."""
    page = (ROOT / "docs" / "reference" / "json_output.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{re.escape(command)}` \| (.*) \|$", page, re.M)
    outside = re.sub(r"\([^()]*\)", "", row)
    outside = outside.partition(": the name")[0]  # a description of the last field's value
    return set(re.findall(r"`(\w+)`", outside))
