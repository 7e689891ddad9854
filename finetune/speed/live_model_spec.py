"""Describe a model in memory for `autoconfig.decisions`, and find its layers and MLPs."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel

from finetune.autoconfig.decisions import ModelSpec
from finetune.core import upstream_private
from finetune.distributed import launch_environment, sharded_tensors
from finetune.kernels.kernel_limits import FROZEN_EXPERTS
from finetune.models import module_names
from finetune.quantization import qat, stacked_experts
from finetune.quantization.fp8_linear import Fp8Linear
from finetune.recipe import adapter_types
from finetune.speed.lm_head_loss import base_model_of


def live_model_spec(model: Any) -> ModelSpec:
    """Describe the current state of a transformers or PEFT model, also after `Fused` has changed it."""
    trained = {n: sharded_tensors.shape(p).numel() for n, p in model.named_parameters() if p.requires_grad}
    layers, ia3 = decoder_layers(model), any("ia3_l" in name for name in trained)
    in_fp8 = any(isinstance(module, Fp8Linear) for module in model.modules())
    four_bit = bool(getattr(base_model_of(model), "is_loaded_in_4bit", False))
    repeated = upstream_private.attention_name(model.config.get_text_config()) in ("sdpa", "eager")
    return ModelSpec(
        config=model.config,
        layers=len(layers),
        adapted=hasattr(model, "peft_config"),
        dtype=str(model.dtype).removeprefix("torch."),
        codes="fp8" if in_fp8 else "4-bit" if four_bit else "",
        trained=sum(trained.values()),
        columns=ia3 or any("lora_magnitude_vector" in name for name in trained),
        multiplied=not ia3,
        dropped=dropped(model) // max(1, len(layers)),
        head=head_trains(model),
        repeated=repeated and launch_environment.parallel("CP") == 1,  # there SDPA has no mask
        rounding=bool(qat.rounding(model)),
        rounded_gib=qat.kept_gib(model),
        fused_mlps=bool(layers) and all(fused_mlps(layer) and not experts_of(layer) for layer in layers),
        breaks=breaking(model),
        **_of_experts(model),
    )


def _of_experts(model: Any) -> dict[str, Any]:
    """Return how stacked experts run, and whether each layer dequantizes them."""
    fused = any(hasattr(module, "finetune_experts") for module in model.modules())
    fused = fused and model.config.get_text_config().model_type not in FROZEN_EXPERTS
    adapted = any(isinstance(module, ParamWrapper) for module in model.modules())
    kind = "fused" if fused else "peft" if adapted else ""
    return {"experts": kind, "dequantized": bool(stacked_experts.all_of(model))}


def decoder_layers(model: nn.Module) -> list[Any]:
    """Return the decoder layers of a transformers or PEFT model in order; empty if they can't be found."""
    layers = getattr(module_names.decoder_of(base_model_of(model)), "layers", None)
    return list(layers) if isinstance(layers, torch.nn.ModuleList) else []


def fused_mlps(layer: Any) -> list[Any]:
    """Return the fused gate and up of a decoder layer's MLPs."""
    fused = [m.finetune_fused for m in layer.modules() if hasattr(m, "finetune_fused")]
    return [parts[0] for parts in fused if len(parts) == 3]


def experts_of(layer: nn.Module) -> list[Any]:
    """Return the experts of a decoder layer's MLP, with weights in one parameter or in a list of modules."""
    return [module for name, module in layer.named_modules() if name.endswith("experts")]


def head_trains(model: PreTrainedModel | PeftModel) -> bool:
    """Return whether the output head trains."""
    head = model.get_output_embeddings()
    return head is not None and any(parameter.requires_grad for parameter in head.parameters())


def dropped(model: Any) -> int:
    """Return the number of inputs of all layers with adapter dropout."""
    adapters = (m for m in model.modules() if getattr(m, "lora_dropout", None))
    drops = (
        any(isinstance(d, torch.nn.Dropout) for d in m.lora_dropout.values()) * m.in_features
        for m in adapters
    )
    return sum(drops)


def breaking(model: nn.Module) -> frozenset[str]:
    """Return the adapters of unfused modules whose forward in PEFT breaks the graph of torch.compile."""
    whole = [module for module in model.modules() if hasattr(module, "finetune_fused")]
    fused, classes = {id(part) for module in whole for part in module.modules()}, set[str]()
    for module in [module for layer in decoder_layers(model) for module in layer.modules()]:
        if not isinstance(module, BaseTunerLayer) or id(module) in fused:
            continue
        kind = type(module).__module__.split(".")[-2]
        classes |= {kind} if kind in adapter_types.BREAKING else set()
        classes |= {"DoRA"} if getattr(module, "lora_magnitude_vector", None) else set()
        wrapper = type(module).__name__ == "ParamWrapper"
        taken_over = wrapper and hasattr(module.get_base_layer(), "finetune_experts")
        classes |= {"experts' adapters"} if wrapper and not taken_over else set()
    return frozenset(classes)
