"""Check the config and the weight files of a base model.

These checks come first, because transformers builds the model of config.json before it looks at the weight
files. A damaged config can ask for any size.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.core import untrusted_files
from finetune.core.errors import UserError, in_one_line
from finetune.core.paths import local_path
from finetune.core.weight_files import INDEX, SINGLE
from finetune.models import architecture, checkpoint_headers, model_files, module_lists
from finetune.quantization import stored_weights

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedModel

    from finetune.core.model_config import ModelConfig
    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Model


def read_config(model: Model) -> Any:
    """Return the model's config object of transformers, after the checks of `finetune check`.

    Raises:
        UserError: a value is wrong, or transformers can't build the model (exit 2).
    """
    model_files.check_folder(model)
    if path := model_files.small_file(model, "config.json"):
        module_lists.read(path, architecture.config_in(path))
    return model_files.read_config(model)


def check_weights(model: Model, config: ModelConfig, declared: dict[str, Any]) -> None:
    """Check the headers of the weight files. Those of a model on the Hub are downloaded first.

    Args:
        declared: the `quantization_config` of the model; empty if it has none.

    Raises:
        UserError: a file is damaged, or lacks a scale or an expert (exit 2). The files are too small for the
            model of config.json (exit 2). A file in the Hub's cache is damaged (exit 3).
    """
    folder = Path(model.name) if local_path(model.name) else _downloaded(model)
    if folder:
        tensors = checkpoint_headers.check_tensors(folder, declared)
        names = module_lists.read(folder / "config.json", config).names
        checkpoint_headers.check_size(tensors, names, declared)


def check_used(loaded: PreTrainedModel, extra: Collection[str], checks: RunChecks | None) -> None:
    """Check the tensors of the files that transformers did not use, and add a note on them."""
    parameters = {name for name, _ in loaded.named_parameters()}
    checkpoint_headers.check_used(extra, parameters, same_names=True)
    if extra and checks is not None and not stored_weights.read(loaded.config):
        shown = ", ".join(sorted(extra)[:3])
        checks.notes.append(f"model.name: the model does not use {len(extra)} tensors of the files: {shown}")


def _downloaded(model: Model) -> Path | None:
    """Return the folder in the Hub's cache where `from_pretrained` finds the weights after a download.

    Return `None` if the Hub has no safetensors of the model.
    """
    folder = model_files.from_hub(_download, model)
    try:
        if folder:
            checkpoint_headers.tensors(folder)
    except UserError as error:
        raise model_files.damaged_cache(model, in_one_line(error, with_found=True)) from error
    return folder


def _download(name: str, revision: str, trust_remote_code: bool) -> Path | None:
    """Take the arguments of `from_pretrained`."""
    from transformers.utils.hub import get_checkpoint_shard_files

    if path := untrusted_files.from_hub(name, revision, SINGLE):
        return Path(path).parent
    path = untrusted_files.from_hub(name, revision, INDEX)
    if path:
        get_checkpoint_shard_files(name, path, revision=revision)
    return Path(path).parent if path else None
