"""The JSON schema of recipes and docs/reference/recipe.md are those of the code."""

import json

from finetune.core import shipped_files
from finetune.recipe import build
from support.paths import ROOT
from support.scripts import module_of


def in_one_order(value: object) -> object:
    """A schema with the alternatives of each union sorted: `typing` keeps the order that was asked for first
    in a process, by whichever library."""
    if isinstance(value, dict):
        sorted_items = {key: in_one_order(part) for key, part in value.items()}
        if isinstance(sorted_items.get("anyOf"), list):
            sorted_items["anyOf"] = sorted(sorted_items["anyOf"], key=lambda part: json.dumps(part))
        return sorted_items
    return [in_one_order(part) for part in value] if isinstance(value, list) else value


def test_the_schema_is_current() -> None:
    now = json.loads(json.dumps(build.json_schema()))
    assert in_one_order(json.loads(shipped_files.SCHEMA.read_text())) == in_one_order(now), "make schema"


def test_every_key_of_a_recipe_is_in_the_docs() -> None:
    make_schema = module_of("scripts", "make_schema")
    assert (ROOT / "docs" / "reference" / "recipe.md").read_text() == make_schema.page(), "make schema"
