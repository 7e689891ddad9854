"""Turn YAML and overrides into a validated recipe, and check all rules about it without importing torch."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.recipe.build import json_schema as json_schema
    from finetune.recipe.loader import load as load_recipe
    from finetune.recipe.schema import Adapter as Adapter
    from finetune.recipe.schema import Data as Data
    from finetune.recipe.schema import Eval as Eval
    from finetune.recipe.schema import Model as Model
    from finetune.recipe.schema import Publish as Publish
    from finetune.recipe.schema import Recipe as Recipe
    from finetune.recipe.schema import Speed as Speed
    from finetune.recipe.schema import Train as Train

__all__ = [
    "Adapter",
    "Data",
    "Eval",
    "Model",
    "Publish",
    "Recipe",
    "Speed",
    "Train",
    "json_schema",
    "load_recipe",
]

__getattr__ = lazy_imports(
    __name__,
    {
        "Recipe": "schema.Recipe",
        "Model": "schema.Model",
        "Data": "schema.Data",
        "Adapter": "schema.Adapter",
        "Speed": "schema.Speed",
        "Train": "schema.Train",
        "Eval": "schema.Eval",
        "Publish": "schema.Publish",
        "json_schema": "build.json_schema",
        "load_recipe": "loader.load",
    },
)
