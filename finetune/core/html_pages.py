"""Load the templates of the HTML pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent / "html"  # parts that several pages include


def templates(folder: Path) -> Any:
    """A strict Jinja environment for the templates in `folder` and the shared parts."""
    import jinja2

    loader = jinja2.FileSystemLoader([folder, SHARED])
    strict = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **strict)
