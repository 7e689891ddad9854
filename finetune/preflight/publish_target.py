"""Check where a run is published. A run folder may come from another person, so it does not decide alone."""

from __future__ import annotations

import json
from typing import Any

from finetune.core.errors import Problem, UserError
from finetune.hub import client
from finetune.recipe.schema import Publish, Recipe

RESOLVED = "recipe.resolved.yaml"


def check_recipe(recipe: Recipe) -> list[str]:
    """Refuse to train with the recipe of a run folder if only that recipe sets where to publish (exit 2)."""
    target = of_file(recipe)
    if recipe.publish.repo is None or recipe.origin.path.resolve().name != RESOLVED or not target:
        return []
    named = " ".join(f"{key}={json.dumps(value)}" for key, value in target.items())
    raise UserError(
        problem(recipe, f"add `publish.repo=null` to the command; to publish to this place, add `{named}`")
    )


def check_names(section: Publish) -> None:
    """Check the form of the names in `publish:`, without the network."""
    for key in ("repo", "base_model"):
        name = getattr(section, key)
        if name is not None:
            client.check_name(name, f"publish.{key}")


def of_file(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of `publish:` that decide the place and the readers and that no override sets."""
    section, plain = recipe.publish, Publish()
    keys = [key for key in ("repo", "private", "revision") if getattr(section, key) != getattr(plain, key)]
    named = {f"publish.{key}": getattr(section, key) for key in keys}
    return {key: value for key, value in named.items() if recipe.origin.set_by.get(key) != "override"}


def problem(recipe: Recipe, fix: str) -> Problem:
    """Return the problem of a place to publish that only a run folder sets."""
    target, section = of_file(recipe), recipe.publish
    found = f"{section.repo} ({'private' if section.private else 'public'})"
    found += f", branch {section.revision}" if section.revision else ""
    return Problem(
        "only the run folder says where to publish this run, or that it is public",
        next(iter(target)),
        where=str(recipe.origin.path),
        found=found,
        why="the run folder may come from another person",
        fix=fix,
        code="publish-target",
    )
