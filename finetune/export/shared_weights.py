"""Refuse to merge adapters on layers that share one weight, before a weight is loaded."""

from __future__ import annotations

from finetune.core.errors import Problem, UserError
from finetune.models import checkpoint_headers, model_files, module_lists, module_names
from finetune.quantization import stored_weights
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder


def check(folder: RunFolder, recipe: Recipe) -> None:
    """Refuse to merge an adapter on layers that share one weight, such as Zamba's attention (exit 2).

    Each of these layers has its own adapter, and one weight can't hold the sums with all of them.
    """
    if folder.weights == folder.model:
        return
    plain = module_lists.of_config(stored_weights.forget(model_files.read_config(recipe.model)))
    names = module_names.of_model(plain)
    layers = {name.rpartition(".")[0] for name in (*names.shared, *names.shared.values())}
    tensors = checkpoint_headers.tensors(folder.adapter)
    prefixes = {f"base_model.model.{layer}.": layer for layer in layers}
    if lost := sorted({prefixes[one] for one in prefixes if any(name.startswith(one) for name in tensors)}):
        raise UserError(
            Problem(
                "the adapter changes layers that share their weights, so it can't be merged",
                where=str(folder.adapter),
                found=f"{len(lost)} modules, such as {lost[0]}",
                fix="use the adapter with PEFT, without a merge",
                why="each layer has its own adapter, and a merged model has one weight for all of them",
                code="merge",
            )
        )
