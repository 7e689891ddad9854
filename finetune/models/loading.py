"""Load the base model with the chosen dtype, attention and quantization, and check them after loading."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from finetune.core import upstream_private
from finetune.core.errors import UserError, stage
from finetune.core.paths import local_path
from finetune.distributed import launch_environment
from finetune.models import checked_files, corrections, model_class, model_files, tokenizer_setup
from finetune.quantization import stored_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.model_config import ModelConfig
    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Model


# transformers changes torch.nn.init and the default dtype of the whole process while it loads a model
ONE_AT_A_TIME = threading.Lock()


def load(model: Model, setup: Setup, device: str, checks: RunChecks | None = None) -> PreTrainedModel:
    """Load the base model with the quantization and attention of `setup`.

    The attention of the model's own config.json is not used.

    Args:
        device: a device such as `cpu` or `cuda:0`, or `auto` to distribute the layers over all GPUs.
    """
    import torch

    from finetune.models import quantized_loading

    config, storage = model_files.read_config(model), setup.storage.value
    model_files.check_weights(model)
    stored, declared = stored_weights.read(config), stored_weights.declaration(config)
    if stored and (slow := stored_weights.slow_pattern(config, lambda: _modules(config))):
        raise UserError(*slow)
    upstream_private.set_attention_name(config, setup.attn_implementation)
    options: dict[str, Any] = {
        "config": config,
        "attn_implementation": setup.attn_implementation,
        "dtype": getattr(torch, setup.weights_dtype),
    }
    options |= quantized_loading.options(config, stored, storage, options["dtype"])
    # Accelerate sends the weights of rank 0 to the other ranks. DeepSpeed shards them while it loads, and
    # supports no device map.
    if device != "cpu" and not launch_environment.read_by_rank_0() and setup.launch.sharded != "DeepSpeed":
        options["device_map"] = device if device == "auto" else {"": device}
    if launch_environment.read_by_rank_0() and not setup.launch.main:
        loaded = without_weights(stored_weights.forget(config), options["dtype"])
    else:
        checked_files.check_weights(model, config, declared)
        read = model_class.auto_class(config).from_pretrained
        with ONE_AT_A_TIME, stage("loaded the base model", "model.name"):
            loaded, found = model_files.from_hub(
                read, model, output_loading_info=True, use_safetensors=True, **options
            )
        quantized_loading.check_missing(found["missing_keys"], found["unexpected_keys"])
        checked_files.check_used(loaded, found["unexpected_keys"], checks)
        if stored:
            quantized_loading.finish(loaded, stored, storage, options["dtype"], checks)
    corrections.apply(loaded, setup.launch.sharded, checks)
    if storage in quantized_loading.QUANTIZED:
        by_fsdp = setup.launch.sharded == "FSDP"
        quantized_loading.check_and_pack(loaded, storage, checks, for_fsdp=by_fsdp, stored=bool(stored))
    if not local_path(model.name):
        upstream_private.set_commit_hash(loaded.config, model_files.commit(model))
    if model.add_tokens:
        _add_rows(loaded, tokenizer_setup.added_tokens(model, tokenizer_setup.load_tokenizer(model)))
    return loaded


def _modules(config: ModelConfig) -> list[str]:
    """Return the module names of a quantized model."""
    plain = stored_weights.forget(copy.deepcopy(config))
    return [name for name, _ in without_weights(plain, None).named_modules() if name]


def without_weights(config: ModelConfig, dtype: torch.dtype | None) -> Any:
    """Build a model from this config for a process that gets its shards of the weights from rank 0.

    Names, shapes, dtypes and buffers are correct. The memory of the weights is allocated but never touched,
    so it uses no RAM. transformers' own loading would read all files in every process.
    """
    import torch
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        made = model_class.auto_class(config).from_config(config, dtype=dtype)
    for module in made.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            empty = torch.empty(held.shape, dtype=held.dtype, device="cpu")
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=held.requires_grad))
    made.tie_weights()
    return made.eval()


def _add_rows(loaded: Any, tokens: list[int]) -> None:
    """Add rows for new tokens to embeddings and head. Their value is the mean of the existing rows."""
    import torch

    old = len(loaded.get_input_embeddings().weight)
    if max(tokens) >= old:
        loaded.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        with torch.no_grad():
            mean = module.weight[: min(old, min(tokens))].float().mean(0)
            module.weight[tokens] = mean.to(module.weight.dtype)
