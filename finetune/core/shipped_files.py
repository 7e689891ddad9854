"""Find the shipped recipes, accelerate configs and examples, in the checkout or in the installed wheel."""

from __future__ import annotations

import os
import re
from pathlib import Path

from finetune.core import safe_files, strict_yaml
from finetune.core.command_lines import command
from finetune.core.errors import Problem, UserError, nearest

PACKAGE = Path(__file__).resolve().parents[1]
NOT_RECIPES = ("ablation", "sweep")  # files of the recipes folder for `ablate` and `sweep`
SCHEMA = PACKAGE / "recipe" / "recipe.schema.json"


def folder(name: str) -> Path:
    """Return the path of `recipes`, `accelerate_configs` or `examples` in this installation."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def recipes() -> dict[str, Path]:
    """Return every shipped recipe by its name, such as `quickstart` or `llama3_8b/dora`."""
    root = folder("recipes")
    named = {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.rglob("*.yaml"))}
    return {name: path for name, path in named.items() if name not in NOT_RECIPES}


def recipe_path(name: str | Path) -> Path:
    """Return the file of a recipe from its path or from the name of a shipped recipe."""
    shipped = recipes().get(str(name)) if not os.path.exists(name) else None
    return shipped or Path(name)


def named(path: Path) -> str:
    """Return the shipped recipe that a missing path such as `recipes/quickstart.yaml` ends in, or nothing."""
    parts, known = (path.with_suffix("") if path.suffix in (".yaml", ".yml") else path).parts, recipes()
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in known), "")


def purpose(path: Path) -> str:
    """Return the first comment of a recipe, without comments for editors."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and "yaml-language-server" not in line:
            return line[2:]
    return ""


def text(name: str) -> str:
    """Return the text of a shipped recipe.

    Raises:
        UserError: there is no such recipe (exit 2).
    """
    known = recipes()
    if name not in known:
        near = named(Path(name)) or nearest(name, known)
        raise UserError(
            Problem(
                f"no shipped recipe is called {name}",
                fix=command("recipes", near) if near else command("recipes"),
                code="recipe-file",
            )
        )
    return known[name].read_text(encoding="utf-8")


def copy(name: str, target: Path) -> list[Path]:
    """Copy a recipe and the shipped files that it names into `target`, and return the new files.

    Files that exist stay. The recipe is written last, so the same call completes an interrupted copy.

    Raises:
        UserError: there is no such recipe, a file of that name exists, or a link is in the way (exit 2).
    """
    content = text(name)
    destination = target / recipes()[name].name
    if destination.exists():
        raise UserError(
            Problem(
                "finetune does not overwrite an existing file",
                where=str(destination),
                fix="move the file, or copy to another folder",
                code="path",
            )
        )
    target.mkdir(parents=True, exist_ok=True)
    written = [destination]
    for path in _named_files(strict_yaml.parse(content, name).value):
        if _copy_files(folder("examples").parent / path, target, path):
            written.append(target / path)
    safe_files.write_text(target, destination.name, re.sub(r"(?<=\$schema=)\S+", str(SCHEMA), content))
    return written


def _copy_files(source: Path, target: Path, name: str) -> bool:
    """Copy a shipped file or folder to `name` below `target`, without following a link there.

    Returns:
        Whether a file was missing.
    """
    files = [source] if source.is_file() else [file for file in sorted(source.rglob("*")) if file.is_file()]
    missing = [file for file in files if not (target / name / file.relative_to(source)).exists()]
    for file in missing:
        copied = Path(name) / file.relative_to(source)
        safe_files.make_folder(target, str(copied.parent))
        safe_files.write_bytes(target, str(copied), file.read_bytes())
    return bool(missing)


def _named_files(value: object) -> list[str]:
    """Return every `examples/...` path in a recipe."""
    if isinstance(value, dict):
        return [path for item in value.values() for path in _named_files(item)]
    return [value] if isinstance(value, str) and value.startswith("examples/") else []
