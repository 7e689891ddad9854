"""Fuse the adapters of any PEFT model in your own training loop: `apply` and `remove`."""

from __future__ import annotations

import logging

import torch
from peft import PeftModel
from torch import nn

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.library_calls import library_call
from finetune.quantization import four_bit, fp8_linear
from finetune.speed import live_model_spec, lm_head_loss
from finetune.speed.fused_layers import Fused
from finetune.speed.fused_lora import Stack, base_layer_of

log = logging.getLogger("finetune")
WITHOUT = "train without `finetune.speed.apply`"


@library_call("fused the adapters")
def apply(model: PeftModel) -> PeftModel:
    """Fuse the adapters of a PEFT model in place, and return the model.

    q, k and v become one GEMM with the base weights and one with the adapters. A gated MLP becomes one
    operation. LoRA, DoRA, AdaLoRA and IA3 are supported. The base weights may be in bf16, fp16, fp32, fp64,
    fp8 (`finetune.load_model`) or 4 bits (bitsandbytes). The model keeps its modules, parameters and state
    dict, so that `save_pretrained` writes the same adapter. finetune first compares every fused layer with
    PEFT's own forward. `logging.getLogger("finetune")` logs which layers are not fused, with the reason.

    Call it before the first step, on a model that is on its device. Evaluation, generation, and layers with a
    disabled or merged adapter run PEFT's own forward. So do layers with trained base weights, and layers with
    hooks on inner modules. A second call fuses the layers again. Call `remove` before `copy.deepcopy`, and
    before you take gradients of gradients (`create_graph=True`), which is an error with fused layers.

    Raises:
        UserError: the model has no adapter, or no adapter that can be fused.
    """
    if not getattr(model, "peft_config", None):
        raise UserError(
            Problem(
                "the model has no adapter",
                found=type(model).__name__,
                expected="a PeftModel",
                fix="call `peft.get_peft_model(model, LoraConfig(...))` first",
                code="speed-option",
            )
        )
    remove(model)
    layers = live_model_spec.decoder_layers(model)
    if not layers:
        raise UserError(
            Problem(
                (
                    "finetune does not know the decoder layers of "
                    f"{type(lm_head_loss.base_model_of(model)).__name__}"
                ),
                fix=WITHOUT,
                code="speed-option",
            ),
            code=Exit.ENVIRONMENT,
        )
    fused = Fused(model, layers, every_pass=True)
    reasons = fused.left_out()
    if not (fused.served or fused.experts.served or fused.experts.installed):
        remove(model)
        raise UserError(
            Problem(
                "none of the adapter's layers can be fused",
                found=reasons or "no layer with an adapter",
                fix=WITHOUT,
                code="speed-option",
            ),
            code=Exit.ENVIRONMENT,
        )
    log.info("fused %s", fused.summary())
    return model


@library_call("removed the fused adapters")
def remove(model: PeftModel) -> PeftModel:
    """Restore the own forward of every layer that `apply` changed, and return the model.

    Base weights that were concatenated in memory get their own tensors again. A model that was not fused does
    not change.

    Raises:
        UserError: the argument is not a model.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            Problem(
                "the argument is not a model",
                found=f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__,
                expected="a PeftModel",
                fix="pass the model that `finetune.speed.apply` returned",
                code="value-type",
            )
        )
    fused: Fused | None = vars(model).pop("finetune_fused_by", None)
    if fused is None:
        return model
    if fused.hook is not None:
        fused.hook.remove()
    fused.experts.remove()
    vars(model).pop("finetune_norms", None)
    for module in model.modules():
        vars(module).pop("finetune_norm", None)
        if parts := vars(module).pop("finetune_fused", None):
            vars(module).pop("forward")
            for layer in [layer for part in parts if isinstance(part, Stack) for layer in part.layers]:
                _own_memory(base_layer_of(layer))
    return model


def _own_memory(base: nn.Linear) -> None:
    """Copy the weight of a linear layer, and its fp8 scale, to memory that no other layer shares."""
    if four_bit.is_four_bit(base):
        return
    tensors: list[torch.Tensor] = [base.weight] if base.bias is None else [base.weight, base.bias]
    if isinstance(base, fp8_linear.Fp8Linear):
        tensors.append(base.weight_scale)
    for tensor in tensors:
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone()
