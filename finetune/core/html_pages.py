"""Load the templates of the HTML pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.core.visible_text import visible_lines

SHARED = Path(__file__).parent / "html"  # parts that several pages include


def templates(folder: Path) -> Any:
    """A strict Jinja environment for the templates in `folder` and the shared parts.

    Whatever a template shows is escaped, and a character that would act on the page's order is visible.
    """
    import jinja2
    from markupsafe import Markup

    def shown(value: object) -> Any:
        return visible_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    loader = jinja2.FileSystemLoader([folder, SHARED])
    return jinja2.Environment(
        loader=loader,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
