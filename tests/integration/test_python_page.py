"""docs/guides/python.md lists the package's public names. tests/docs/test_pages.py runs its examples."""

from __future__ import annotations

import re

import finetune
from finetune import speed
from support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")


def test_table_of_the_python_page_lists_every_public_function() -> None:
    listed = set(re.findall(r"^\| `([\w.]+)\(", PAGE, flags=re.MULTILINE))
    public = {name for name in finetune.__all__ if name[0].islower() and name != "speed"}
    assert listed == public | {f"speed.{name}" for name in speed.__all__}
