"""Environments of launches, and a machine."""

from __future__ import annotations

from typing import Any

from finetune.hardware.detection import Hardware
from finetune.recipe import loader
from finetune.recipe.schema import Data, Model, Recipe, Speed
from support.paths import QUICKSTART

H100 = Hardware("cuda", "NVIDIA H100 80GB HBM3", 8, (9, 0), 79.6, 96)
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
PARALLEL = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


def unchecked_recipe(kind: str, **sections: dict[str, Any]) -> Recipe:
    """The quickstart with another type and other sections, also of values that do not go together."""
    recipe, parts = loader.load(QUICKSTART), {"model": Model, "data": Data, "speed": Speed}
    changed: dict[str, Any] = {name: parts[name].model_validate(given) for name, given in sections.items()}
    return recipe.model_copy(update={**changed, "adapter": recipe.adapter.model_copy(update={"type": kind})})
