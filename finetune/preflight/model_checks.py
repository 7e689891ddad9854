"""Check the architecture and the quantization of a base model."""

from __future__ import annotations

from finetune.autoconfig import base_quantization
from finetune.core.errors import Exit, raise_if_any
from finetune.core.model_config import ModelConfig
from finetune.models import architecture, model_class, model_files
from finetune.quantization import stored_weights
from finetune.quantization.stored_weights import Stored
from finetune.recipe.schema import Recipe


def check_model(recipe: Recipe) -> None:
    """Refuse a model whose architecture or quantization finetune does not support (exit 2)."""
    path = model_files.file_on_disk(recipe.model, "config.json")
    if path is None:  # `architecture.read` reads it from the Hub, or refuses the folder
        return
    config = architecture.config_in(path)
    model_class.check(config)
    stored = stored_weights.read(config)
    if stored:
        raise_if_any(stored_weights.conflicts(stored, recipe))


def check_stored(recipe: Recipe, config: ModelConfig) -> Stored | None:
    """Return the quantization of a checkpoint; `None` if it is not quantized or its config is not known.

    Raises:
        UserError: the recipe can't train on this quantization (exit 2), or a package is missing (exit 3).
    """
    stored = stored_weights.read(config)
    if stored is None:
        return None
    raise_if_any(stored_weights.conflicts(stored, recipe))
    if stored.stays:
        raise_if_any([base_quantization.missing_package(stored.storage)], code=Exit.ENVIRONMENT)
    return stored
