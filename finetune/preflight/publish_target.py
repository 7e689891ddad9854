"""Where a run is published: a run folder, which may be another person's, does not decide it alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.recipe.schema import Publish

if TYPE_CHECKING:
    from finetune.recipe.schema import Recipe

RESOLVED = "recipe.resolved.yaml"


def check_recipe(recipe: Recipe) -> list[str]:
    """Refuse to train by the recipe of a run folder, if only that recipe says where to publish (exit 2)."""
    target = of_file(recipe)
    if recipe.publish.repo is None or recipe.origin.path.resolve().name != RESOLVED or not target:
        return []
    named = " ".join(f"{key}={json.dumps(value)}" for key, value in target.items())
    fix = f"publish.repo=null at the end of the command; to publish there: {named}"
    raise UserError(problem(recipe, fix))


def of_file(recipe: Recipe) -> dict[str, Any]:
    """What decides where a run is published and who can read it, as far as no override says it."""
    section, plain = recipe.publish, Publish()
    keys = [key for key in ("repo", "private", "revision") if getattr(section, key) != getattr(plain, key)]
    named = {f"publish.{key}": getattr(section, key) for key in keys}
    return {key: value for key, value in named.items() if recipe.origin.set_by.get(key) != "override"}


def problem(recipe: Recipe, fix: str) -> Problem:
    """The problem of a target that stands in a run folder alone, which may be another person's."""
    target, section = of_file(recipe), recipe.publish
    what = "only the run folder says where this run is published, or that it is public"
    found = f"{section.repo} ({'private' if section.private else 'public'})"
    found += f", branch {section.revision}" if section.revision else ""
    return Problem(what, next(iter(target)), str(recipe.origin.path), found, fix=fix)
