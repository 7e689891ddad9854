"""List a model's trainable and frozen parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.models import module_names, token_limits

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from finetune.recipe.adapter_types import Shapes


def towers(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parts of a multimodal base model other than its text model and head, by name."""
    text = {id(p) for module in module_names.of_text(model) for p in module.parameters(recurse=False)}
    return {name: p for name, p in model.named_parameters() if id(p) not in text}


def shapes(model: PreTrainedModel) -> Shapes:
    """Facts about a model for adapter types. A quantized layer has its unquantized shape."""
    return {name: _sizes(module) for name, module in linear_layers(model).items()}


def _sizes(layer: Any) -> tuple[int, int]:
    """Return (outputs, inputs) of a linear layer. GPT-2's Conv1D is stored transposed."""
    if hasattr(layer, "out_features"):
        return layer.out_features, layer.in_features
    inputs, outputs = layer.weight.shape
    return outputs, inputs


def linear_layers(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Return the linear layers of the text model by full name, without the output head."""
    return {name: model.get_submodule(name) for name in module_names.of_model(model).linear}


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def train_in_fp32(model: torch.nn.Module) -> dict[str, torch.dtype]:
    """Cast every trainable weight to fp32, so that small steps are not lost.

    PEFT casts only its own matrices, not modules that train as a whole.

    Returns:
        The original dtypes by name, in which the weights are loaded again.
    """
    import torch

    halves = {n: p.dtype for n, p in trainable(model).items() if p.dtype in (torch.bfloat16, torch.float16)}
    for name in halves:
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    return halves


def frozen(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor that must not change in training: frozen parameters and buffers.

    AdaLoRA's `ranknum` belongs to the adapter, not to the base model. Frequencies of some rotary embeddings
    change with the length of a sequence.
    """
    tensors: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    tensors.update(model.named_buffers())
    for name, tensor in list[tuple[str, Any]](tensors.items()):
        if hasattr(tensor, "__tensor_flatten__") and not hasattr(
            tensor, "full_tensor"
        ):  # torchao stores quantized weights and scales in one tensor
            del tensors[name]
            inner, _ = tensor.__tensor_flatten__()
            tensors.update({f"{name}.{part}": getattr(tensor, part) for part in inner})
    config: Any = getattr(model, "config", None)
    moving = ("inv_freq",) if config is not None and token_limits.batch_limit(config) else ()
    kept = (name for name in tensors if "ranknum" not in name and not name.endswith(moving))
    return {name: tensors[name] for name in kept}
