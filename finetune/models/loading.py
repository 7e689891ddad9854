"""Tokenizer and base model: dtype, attention and storage as they were chosen, read back after loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.autoconfig.mixed_precision import DTYPES, STORED
from finetune.core.errors import Problem, UserError
from finetune.core.paths import local_path
from finetune.distributed import launch_environment
from finetune.models import model_files, tokenizer_setup
from finetune.recipe.adapter_types import FOUR_BIT, QUANTISED

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune.autoconfig.machine_setup import Setup
    from finetune.core.run_checks import RunChecks
    from finetune.recipe.schema import Model


def load(model: Model, setup: Setup, device: str, ledger: RunChecks | None = None) -> PreTrainedModel:
    """The base model, stored and attending as `setup` chose.

    Args:
        device: `cpu`, `cuda:0`; `auto`: layer by layer over all GPUs.

    Attention is always named here: what a model's own config.json says of it is not followed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = model_files.read_config(model)
    model_files.check_weights(model)
    if setup.storage.value == "fp8":
        from finetune.quantization import fp8_loading

        fp8_loading.check_checkpoint(config)
        vars(config).pop("quantization_config", None)  # our layers take its weights as those of a plain model
    # as an argument it would yield to an `_attn_implementation` in config.json, a Hub kernel's name too
    config._attn_implementation = setup.attn_implementation
    options: dict[str, Any] = {"config": config, "attn_implementation": setup.attn_implementation}
    if setup.storage.value in QUANTISED:
        options["dtype"] = getattr(torch, DTYPES[setup.launch.precision])
        options["quantization_config"] = _quantised(setup.storage.value, options["dtype"])
    else:
        options["dtype"] = getattr(torch, STORED[setup.storage.value])
    # Accelerate hands on what rank 0 read; DeepSpeed splits it while it is read, and takes no map
    if device != "cpu" and not launch_environment.read_by_rank_0() and setup.launch.sharded != "DeepSpeed":
        options["device_map"] = device if device == "auto" else {"": device}
    if launch_environment.read_by_rank_0() and not setup.launch.main:
        loaded, missing = without_weights(config, options["dtype"]), []
    else:
        read = AutoModelForCausalLM.from_pretrained
        loaded, found = model_files.from_hub(
            read, model, output_loading_info=True, use_safetensors=True, **options
        )
        missing = sorted(found["missing_keys"])
    if missing:  # transformers would make them up
        what, fix = f"its files lack {len(missing)} of the model's weights", "download it again"
        raise UserError(Problem(what, "model.name", found=", ".join(missing[:6]), fix=fix))
    if setup.launch.sharded == "DeepSpeed":
        from finetune.distributed import deepspeed_zero

        deepspeed_zero.own_buffers(loaded)
    for module in loaded.modules():
        # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first evaluation, and computes
        # wrong gradients from then on (bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward)
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    if setup.storage.value == "fp8":
        from finetune.models import quantization_checks
        from finetune.quantization import fp8_loading

        if ledger:
            quantization_checks.add_receipt(loaded, ledger)
        if setup.launch.sharded == "FSDP":
            fp8_loading.pack(loaded)
    elif ledger and setup.storage.value in QUANTISED:
        from finetune.models import quantization_checks

        quantization_checks.add_coded_receipt(loaded, setup.storage.value, ledger)
    if setup.storage.value in FOUR_BIT and setup.launch.sharded == "FSDP":
        from finetune.quantization import four_bit

        four_bit.pack(loaded)
    if not local_path(model.name):
        loaded.config._commit_hash = model_files.commit(model)  # transformers no longer does (5.22)
    if model.add_tokens:
        _add_rows(loaded, tokenizer_setup.added_tokens(model, tokenizer_setup.load_tokenizer(model)))
    return loaded


def without_weights(config: Any, dtype: torch.dtype) -> Any:
    """A model of this config, for a process that gets its part of the weights from rank 0.

    Names, shapes, dtypes and buffers are right; the weights' memory is never touched, so that it takes none.

    transformers itself has every process read all files, and forget them.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in made.modules():
        for name, held in list(module.named_parameters(recurse=False)):
            empty = torch.empty(held.shape, dtype=held.dtype, device="cpu")
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=held.requires_grad))
    made.tie_weights()
    return made.eval()


def _add_rows(loaded: Any, tokens: list[int]) -> None:
    """Rows for new tokens, in the embeddings and the head: the mean of the old ones, no random draw."""
    import torch

    old = len(loaded.get_input_embeddings().weight)
    if max(tokens) >= old:
        loaded.resize_token_embeddings(max(tokens) + 1, mean_resizing=False)
    for module in (loaded.get_input_embeddings(), loaded.get_output_embeddings()):
        with torch.no_grad():
            mean = module.weight[: min(old, min(tokens))].float().mean(0)
            module.weight[tokens] = mean.to(module.weight.dtype)


def _quantised(storage: str, compute: torch.dtype) -> Any:
    """transformers' quantisation config: our fp8; NF4 and FP4 in blocks of 64 with double quantisation (arXiv
    2305.14314), LLM.int8() (arXiv 2208.07339), or torchao's int8 weights with a scale for each output."""
    if storage == "fp8":
        from finetune.quantization.fp8_loading import Fp8BaseConfig

        return Fp8BaseConfig()
    if storage == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if storage == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=storage,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
