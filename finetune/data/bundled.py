"""Chat templates by name, and their twins with the assistant's tokens marked."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from finetune.errors import Problem, UserError, nearest


@cache
def bundled() -> dict[str, str]:
    """Templates by name: TRL's for which it has a marked twin, and ours for families it has none for."""
    names = {entry.name.removesuffix(".jinja") for entry in _trl().iterdir()}
    found = {
        name: (_trl() / f"{name}.jinja").read_text(encoding="utf-8")
        for name in names
        if f"{name}_training" in names
    }
    own = files("finetune.data") / "templates"
    found |= {entry.name.removesuffix(".jinja"): entry.read_text(encoding="utf-8") for entry in own.iterdir()}
    return dict(sorted(found.items()))


def _trl() -> Path:
    """TRL's templates; it is not imported, which takes a third of a second."""
    spec = find_spec("trl")
    assert spec and spec.origin
    return Path(spec.origin).parent / "chat_templates"


def marked_twin(template: str) -> str | None:
    """TRL's variant of a template with the assistant's tokens marked, if it has one."""
    name = next((name for name, text in bundled().items() if text == template), None)
    twin = _trl() / f"{name}_training.jinja"
    return twin.read_text(encoding="utf-8") if name and twin.is_file() else None


def read_template(name: str) -> str:
    """A bundled template, or the content of a file (exit 2 if it is neither)."""
    path = Path(name)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise UserError(Problem("not UTF-8", "data.chat_template", found=name)) from None
    known = bundled()
    if name not in known:
        expected = f"a Jinja file, or one of {', '.join(known)}"
        fix = nearest(name, known)
        problem = Problem("no such template", "data.chat_template", found=name, expected=expected, fix=fix)
        raise UserError(problem)
    return known[name]
