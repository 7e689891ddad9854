"""Load a mixture of experts with bitsandbytes: linear layers as transformers does, and the stacked experts.

transformers quantizes only linear layers with bitsandbytes (transformers 5.22, quantizer_bnb_4bit.py and
quantizer_bnb_8bit.py). Here each stack of experts is quantized when it is read, before the next one is read.
So memory never holds all of them in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizer_bnb_8bit import Bnb8BitHfQuantizer

from finetune.quantization import mxfp4_experts, stacked_experts

FOUR_BIT, EIGHT_BIT = "finetune_bnb_4bit", "finetune_bnb_8bit"


class FourBitConfig(BitsAndBytesConfig):
    """bitsandbytes' config, for a model whose stacked experts are quantized to 4 bits, too.

    Args:
        mxfp4_experts: whether the checkpoint holds the experts in mxfp4, which they keep.
    """

    def __init__(self, *, mxfp4_experts: bool = False, **options: object) -> None:
        super().__init__(**{**options, "load_in_4bit": True})
        self.quant_method: Any = FOUR_BIT
        self.mxfp4_experts = mxfp4_experts


class EightBitConfig(BitsAndBytesConfig):
    """bitsandbytes' config, for a model whose stacked experts are quantized to int8, too.

    Args:
        mxfp4_experts: whether the checkpoint holds the experts in mxfp4, which they keep.
    """

    def __init__(self, *, mxfp4_experts: bool = False, **options: object) -> None:
        super().__init__(**{**options, "load_in_8bit": True})
        self.quant_method: Any = EIGHT_BIT
        self.mxfp4_experts = mxfp4_experts


def with_experts(quantizer: Any) -> Any:
    """Return a subclass of transformers' quantizer of linear layers that also quantizes stacked experts."""

    class WithExperts(quantizer):
        def _process_model_before_weight_loading(
            self, model: PreTrainedModel, *args: object, **kwargs: object
        ) -> Any:
            self.experts = stacked_experts.names(model)
            return super()._process_model_before_weight_loading(model, *args, **kwargs)

        def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: object) -> bool:
            return param_name in self.experts or super().param_needs_quantization(model, param_name, **kwargs)

        def get_weight_conversions(self) -> Any:
            kept = mxfp4_experts.conversions() if self.quantization_config.mxfp4_experts else []
            return [*super().get_weight_conversions(), *kept]

        def get_quantize_ops(self) -> Any:
            config = self.quantization_config
            return _Quantize(
                super().get_quantize_ops(), config.bnb_4bit_quant_type if config.load_in_4bit else "int8"
            )

        def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> Any:
            stacked_experts.parametrize_experts(model)
            return super()._process_model_after_weight_loading(model, **kwargs)

        def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
            stacked_experts.dequantize(model, dtype)
            return super()._dequantize(model, dtype)

        def is_serializable(self) -> Any:
            return False  # only the adapter is saved

    return WithExperts


class _Quantize(ConversionOps):
    """Quantize a stack of experts, or a linear layer as transformers does."""

    def __init__(self, linear: Any, storage: str) -> None:
        self.linear, self.storage = linear, storage

    def convert(self, input_dict: dict[str, Any], *args: object, **kwargs: object) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, value in input_dict.items():
            if name.endswith(stacked_experts.STACKED):
                weight = value[0] if isinstance(value, list) else value
                kept = hasattr(weight, "dequantize_by")  # in mxfp4
                made[name] = weight if kept else stacked_experts.quantize(weight, self.storage)
            else:
                made |= self.linear.convert({name: value}, *args, **kwargs)
        return made


for _method, _config, _quantizer in (
    (FOUR_BIT, FourBitConfig, Bnb4BitHfQuantizer),
    (EIGHT_BIT, EightBitConfig, Bnb8BitHfQuantizer),
):
    register_quantization_config(_method)(_config)
    register_quantizer(_method)(with_experts(_quantizer))
