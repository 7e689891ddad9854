"""Names of a model's modules and parameters, and which of them a recipe's names match; what they weigh."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

TEXT_MODEL = "language_model"  # what transformers calls the decoder of a multimodal model


class Names(NamedTuple):
    """The names a recipe may use for parts of a model, each in full, without PEFT's prefixes."""

    linear: list[str]
    """Linear layers, without the head: what "all-linear" means."""
    modules: list[str]
    """Modules that hold a weight: linear layers, embeddings, norms, the head."""
    parameters: list[str]

    @property
    def layers(self) -> int:
        numbers = {int(found[1]) for name in self.modules if (found := re.search(r"\.(\d+)\.", name))}
        return max(numbers, default=-1) + 1


def of_experts(model: Any) -> int:
    """Bytes of the experts' weights that stand in one parameter for all: no linear layers."""
    named = model.named_parameters()
    return sum(p.nbytes for name, p in named if p.dim() == 3 and ".experts." in name)


def stored_as(layer: Any) -> str:
    """The value of `model.quantization` that a module is stored with; empty: not quantized."""
    weight: Any = getattr(layer, "weight", None)
    if type(weight).__module__.startswith("torchao."):
        return "torchao_int8"
    if type(layer).__name__ == "Linear8bitLt":
        return str(weight.dtype).removeprefix("torch.")
    if type(layer).__name__ == "Fp8Linear":
        return "fp8"
    return getattr(getattr(weight, "quant_state", None), "quant_type", "")


def of_text(model: Any) -> list[Any]:
    """The modules of a transformers model that text runs through: all, but for a multimodal one's towers."""
    if model.config.get_text_config() is model.config:
        return list(model.modules())
    head = model.get_output_embeddings()
    return [*model.get_decoder().modules(), *(head.modules() if head is not None else ())]


def short(name: str) -> str:
    """`model.layers.0.self_attn.q_proj` -> `q_proj`."""
    return name.rpartition(".")[2]
