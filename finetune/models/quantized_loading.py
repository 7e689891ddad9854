"""Build the arguments of `from_pretrained` for a quantized base model, and finish the model after loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from finetune.core import formatting, model_config, upstream_private
from finetune.core.errors import Exit, Problem, UserError
from finetune.models import checkpoint_headers, direct_reads, module_names
from finetune.quantization import stored_weights
from finetune.recipe.adapter_types import FOUR_BIT, QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from finetune.core.model_config import ModelConfig
    from finetune.core.run_checks import RunChecks
    from finetune.quantization.stored_weights import Stored

# Parts of tensor names in quantized checkpoints: GPTQ and AWQ, compressed-tensors, fp8, mxfp4
CODES = (".qweight", ".qzeros", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_blocks", ".absmax")


def options(config: ModelConfig, stored: Stored | None, storage: str, compute: torch.dtype) -> dict[str, Any]:
    """Return the `quantization_config` argument of `from_pretrained`, if it needs one. Complete `config`.

    Layers whose weights are read directly keep their dtype, such as Mamba's `dt_proj`.

    Args:
        stored: the quantization of a checkpoint that is already quantized.
        storage: the choice for this model: fp8, nf4 and so on, or fp32, bf16 or fp16.
    """
    mxfp4 = bool(stored) and stored.keeps_experts(storage)
    if storage == "fp8" or (stored and stored.storage == "fp8"):
        from finetune.quantization.fp8_loading import Fp8BaseConfig, check_checkpoint

        if not mxfp4:
            check_checkpoint(config)
        stored_weights.forget(config)  # Fp8Linear loads these weights like those of an unquantized model
        kept = direct_reads.kept_modules(config)
        return {"quantization_config": Fp8BaseConfig(kept, mxfp4_experts=mxfp4)}
    if stored and not stored.trains:
        raise UserError(stored_weights.refusal(stored))
    if stored and mxfp4:
        stored_weights.forget(config)
    elif stored:
        own = {"bnb_4bit_compute_dtype": str(compute).removeprefix("torch.")} if stored.stays else {}
        stored_weights.complete(config, **(own or {"dequantize": True}))
        return {}
    if storage not in QUANTIZED:
        return {}
    quantized = _quantized(storage, compute, experts=bool(model_config.experts(config.get_text_config())))
    if mxfp4:
        quantized.mxfp4_experts = True
    key = "modules_to_not_convert" if storage == "torchao_int8" else "llm_int8_skip_modules"
    setattr(quantized, key, direct_reads.kept_modules(config))
    return {"quantization_config": quantized}


def _quantized(storage: str, compute: torch.dtype, *, experts: bool) -> Any:
    """Return transformers' quantization config.

    It is NF4 or FP4 in blocks of 64 with double quantization (arXiv 2305.14314), LLM.int8() (arXiv
    2208.07339), or torchao's int8 weights with one scale per output.

    Args:
        experts: whether the model is a mixture of experts, whose stacks of experts are quantized, too.
    """
    if storage == "torchao_int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if storage == "int8" and not experts:
        return BitsAndBytesConfig(load_in_8bit=True)
    four_bit = {
        "bnb_4bit_quant_type": storage,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": compute,
    }
    if not experts:
        return BitsAndBytesConfig(load_in_4bit=True, **four_bit)
    from finetune.quantization.bnb_loading import EightBitConfig, FourBitConfig

    return EightBitConfig() if storage == "int8" else FourBitConfig(**four_bit)


def finish(
    loaded: PreTrainedModel, stored: Stored, storage: str, dtype: torch.dtype, checks: RunChecks | None
) -> None:
    """Dequantize the weights that must not stay quantized. Cast the other weights to the dtype of the run.

    transformers keeps the dtype of the files for a quantized checkpoint.
    """
    if storage == "fp8":
        return
    if stored.storage == "fp8":
        loaded.dequantize(dtype)
    kept = _kept_in_fp32(loaded)
    for path, module in loaded.named_modules():
        if module_names.stored_as(module):
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.is_floating_point() and name not in kept:
                parameter.data = parameter.data.to(dtype)
    if storage not in QUANTIZED:
        upstream_private.forget_weight_conversions(loaded)
    if checks and storage not in QUANTIZED:
        _add_dequantized_check(loaded, stored, dtype, checks)


def _kept_in_fp32(loaded: PreTrainedModel) -> set[str]:
    """Return the weights that transformers always keeps in float32 in this architecture."""
    parts = [*upstream_private.modules_in_fp32(loaded), *upstream_private.modules_always_in_fp32(loaded)]
    return {name for name, _ in loaded.named_parameters() if any(part in name for part in parts)}


def _add_dequantized_check(
    loaded: PreTrainedModel, stored: Stored, dtype: torch.dtype, checks: RunChecks
) -> None:
    """Add a run check of the dequantized weights."""
    kept = _kept_in_fp32(loaded)
    weights = [one for name, one in loaded.named_parameters() if one.dim() > 1 and name not in kept]
    whole = sum(parameter.dtype == dtype for parameter in weights)
    name = str(dtype).removeprefix("torch.")
    size = formatting.size(loaded.get_memory_footprint())
    checks.add(
        "model.quantization",
        expected=f"dequantized to {name}",
        actual=f"{whole} of {len(weights)} weights in {name}, {size} in all",
        how=f"weights of the live model; the checkpoint is stored in {stored}",
        ok=whole == len(weights),
    )


def check_missing(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Stop if the files of a model lack weights, which transformers would initialize at random (exit 2)."""
    if not missing:
        return
    codes = [name for name in unexpected if name.endswith(CODES)]
    if codes:
        raise UserError(
            Problem(
                "the weights are quantized, but config.json has no quantization_config",
                "model.name",
                found=", ".join(sorted(codes)[:3]),
                fix=stored_weights.WHOLE,
                code="quantization",
            ),
            code=Exit.INPUT,
        )
    raise UserError(checkpoint_headers.missing_weights(missing))


def check_and_pack(
    loaded: PreTrainedModel, storage: str, checks: RunChecks | None, *, for_fsdp: bool, stored: bool
) -> None:
    """Add the run check of the quantized weights, and pack them for FSDP's shards.

    Args:
        storage: one of QUANTIZED.
        stored: whether the checkpoint is quantized already.

    Raises:
        UserError: bitsandbytes would read the 4-bit weights incorrectly on this CPU (exit 3).
    """
    from finetune.models import quantization_checks
    from finetune.quantization import four_bit, fp8_loading

    four_bit.check_rows(four_bit.rows(loaded))
    if checks and storage == "fp8":
        quantization_checks.add_fp8_check(loaded, checks, stored=stored)
    elif checks:
        quantization_checks.add_quantized_weights_check(loaded, storage, checks, stored=stored)
    if for_fsdp and storage == "fp8":
        fp8_loading.pack(loaded)
    if for_fsdp and storage in FOUR_BIT:
        four_bit.pack(loaded)
