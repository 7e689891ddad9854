"""Check the architecture and the quantization of a base model."""

from __future__ import annotations

from pathlib import Path

from finetune.autoconfig import base_quantization
from finetune.core.errors import Exit, raise_if_any
from finetune.core.model_config import ModelConfig
from finetune.kernels.kernel_limits import EXPERTS_BLOCK
from finetune.models import architecture, direct_reads, model_class, model_files, module_lists
from finetune.quantization import stored_weights
from finetune.quantization.stored_weights import Stored
from finetune.recipe import adapter_types
from finetune.recipe.adapter_types import FOUR_BIT
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
    """Check the architecture, and return the quantization of a checkpoint; `None` if it is not quantized.

    Raises:
        UserError: finetune does not support the architecture, or the recipe can't train on this quantization
            (exit 2), or a package is missing (exit 3).
    """
    model_class.check(config)
    stored = stored_weights.read(config)
    if stored is None:
        return None
    raise_if_any(stored_weights.conflicts(stored, recipe))
    if stored.stays:
        raise_if_any([base_quantization.missing_package(stored.storage)], code=Exit.ENVIRONMENT)
    return stored


def partial_blocks(recipe: Recipe, config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the 4-bit layers whose rows are not whole blocks: name -> weights in a row, and in a block.

    Empty for a model on the Hub, whose rows finetune checks when it loads the model.
    """
    folder, stored = Path(recipe.model.name), stored_weights.read(config)
    storage = adapter_types.base_storage(recipe.adapter.type, recipe.model.quantization)
    if (stored.storage if stored and stored.stays else storage) not in FOUR_BIT or not folder.is_dir():
        return {}
    names = module_lists.read(folder / "config.json", config).names
    sizes, kept = {**names.linear_shapes, **names.tower_linear_shapes}, direct_reads.linear_layers(names)
    return {
        name: (inputs, EXPERTS_BLOCK)
        for name, (_, inputs) in sizes.items()
        if inputs % EXPERTS_BLOCK and name not in kept
    }


def check_on_cpu(recipe: Recipe, config: ModelConfig) -> None:
    """Check that bitsandbytes reads the 4-bit weights of a local model correctly on this CPU (exit 3)."""
    if rows := partial_blocks(recipe, config):
        from finetune.quantization import four_bit  # imports torch

        four_bit.check_rows(rows)
