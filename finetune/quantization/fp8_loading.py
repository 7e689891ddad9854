"""Load a frozen fp8 base model: `from_pretrained(..., quantization_config=Fp8BaseConfig())`.

Each weight is quantized when it is read, before the next one is read, so memory never holds a full bf16 copy.
Checkpoints that already hold e4m3 weights are loaded without changes. They need one scale per output or per
weight (the channel and tensor strategies of compressed-tensors).
"""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from finetune.core import upstream_private, weight_files
from finetune.core.errors import Problem, UserError
from finetune.kernels.ops import E4M3, quantize_rows
from finetune.quantization import mxfp4_experts, stacked_experts, stored_weights
from finetune.quantization.fp8_linear import Fp8Linear, fits

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer
    from torch import nn
    from transformers import PreTrainedModel

    from finetune.core.model_config import ModelConfig

METHOD = "finetune_fp8"
SCALE = "weight_scale"


class Fp8BaseConfig(QuantizationConfigMixin):
    """Quantization config of the frozen fp8 base model. `fits` selects the layers.

    Args:
        modules_to_not_convert: names of layers that keep their dtype. `None` means the output head and tied
            layers.
        mxfp4_experts: whether the checkpoint holds the experts in mxfp4, which they keep.
    """

    def __init__(
        self, modules_to_not_convert: list[str] | None = None, *, mxfp4_experts: bool = False, **_: object
    ) -> None:
        self.quant_method: Any = METHOD
        self.modules_to_not_convert = modules_to_not_convert
        self.mxfp4_experts = mxfp4_experts


class Fp8BaseQuantizer(HfQuantizer):
    """Replace a model's linear layers by `Fp8Linear`, and quantize their weights while they are read.

    Adapters can be trained on the model. The model itself cannot be saved, only the adapter.
    """

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> Any:
        stored = renamed(model, stored_layers(kwargs.get("checkpoint_files") or []))
        config: Any = self.quantization_config
        not_converted = self.get_modules_to_not_convert(
            model, config.modules_to_not_convert, upstream_private.modules_in_fp32(model)
        )
        for name, module in list(model.named_modules()):
            if (name in stored if stored else should_convert_module(name, not_converted)) and fits(module):
                model.set_submodule(name, _unread(module, coded=name in stored))
        lost = [n for n in sorted(stored) if not isinstance(_module(model, n), Fp8Linear)]
        self.experts = set[str]() if stored else stacked_experts.names(model)
        if lost:  # transformers would read the quantized values as weights
            raise ValueError(f"its fp8 weights have no fp8 layer here: {', '.join(lost[:6])}")
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: object) -> Any:
        stacked_experts.parametrize_experts(model)
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: object) -> bool:
        if param_name in self.experts:
            return True
        module, leaf = get_module_from_name(model, param_name)
        return isinstance(module, Fp8Linear) and leaf in ("weight", SCALE)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Return the bytes per element after quantization, which transformers uses to reserve GPU memory."""
        leaf = param_name.rpartition(".")[2]
        coded = (leaf == "weight" or param_name in self.experts) and self.param_needs_quantization(
            model, param_name
        )
        return 1.0 if coded else float(param.element_size())

    def get_weight_conversions(self) -> Any:
        config: Any = self.quantization_config
        return mxfp4_experts.conversions() if config.mxfp4_experts else []

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize()

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> Any:
        """Replace fp8 layers by plain linear layers with the dequantized weights, and dequantize experts."""
        stacked_experts.dequantize(model, dtype)
        for name, module in list(model.named_modules()):
            if isinstance(module, Fp8Linear):
                model.set_submodule(name, _plain(module, dtype))
        return model

    def is_serializable(self) -> Any:
        return False

    @property
    def is_trainable(self) -> Any:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


register_quantization_config(METHOD)(Fp8BaseConfig)
register_quantizer(METHOD)(Fp8BaseQuantizer)


class _Quantize(ConversionOps):
    """Quantize one weight when it is read. Weights that are already in fp8 do not change."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *_: object, **kwargs: object) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for name, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            if name.endswith(stacked_experts.STACKED):
                kept = hasattr(value, "dequantize_by")  # in mxfp4
                converted[name] = value if kept else stacked_experts.quantize(value, "fp8")
                continue
            if name.endswith(SCALE):
                layer = get_module_from_name(kwargs["model"], name)[0]
                converted[name] = value.float().reshape(-1, 1).expand(layer.out_features, 1).contiguous()
                continue
            if value.dtype != E4M3:
                value, converted[f"{name.removesuffix('weight')}{SCALE}"] = quantize_rows(value)
            converted[name] = torch.nn.Parameter(value, requires_grad=False)
        return converted


def stored_layers(files: list[str]) -> set[str]:
    """Return the names of the layers whose weights are stored in fp8."""
    names = set[str]()
    for path in files:
        if str(path).endswith(".safetensors"):
            with weight_files.opened(path) as file:
                keys: list[str] = list(file.keys())
            names |= {key.removesuffix(f".{SCALE}") for key in keys if key.endswith(f".{SCALE}")}
    return names


def renamed(model: PreTrainedModel, names: set[str]) -> set[str]:
    """Map layer names of a checkpoint to their names in the model, because transformers renames some weights.

    An example is Gemma 3's `language_model.model.layers`.
    """
    mapping = get_model_conversion_mapping(model) if names else []
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    known = dict.fromkeys((f"{name}.weight" for name, _ in model.named_modules()), True)
    arguments = (renamings, [], model.base_model_prefix, known)
    return {rename_source_key(f"{name}.weight", *arguments)[0].removesuffix(".weight") for name in names}


def check_checkpoint(config: ModelConfig) -> None:
    """Check that the fp8 base model supports the quantization of the checkpoint.

    Raises:
        UserError: the checkpoint has another quantization. The error suggests an alternative (exit 2).
    """
    stored = stored_weights.read(config)
    if stored and stored.storage != "fp8":
        raise UserError(
            Problem(
                "the fp8 base model can't use this quantized checkpoint exactly",
                "model.name",
                found=str(stored),
                expected="e4m3 with a scale for each output (compressed-tensors), or no quantization",
                fix=stored_weights.WHOLE,
                code="quantization",
            )
        )


def products(layers: list[Any]) -> int:
    """Return the number of fp8 GEMMs in a forward pass through decoder layers.

    Each stack of fused layers counts one, and each layer outside a stack counts one.
    """
    stacks: dict[int, int] = {}
    alone: dict[int, Fp8Linear] = {
        id(m): m for layer in layers for m in layer.modules() if isinstance(m, Fp8Linear)
    }
    for module in (m for layer in layers for m in layer.modules() if hasattr(m, "finetune_fused")):
        for stack in module.finetune_fused:
            if hasattr(stack, "stored"):
                stacks[id(stack)] = len(stack.stored) == 2  # values and scales
                for one in stack.layers:
                    for inside in one.modules():
                        alone.pop(id(inside), None)
    return sum(stacks.values()) + len(alone)


def refuse_merges(adapted: nn.Module) -> None:
    """Make PEFT's `merge` raise an error on fp8 layers. It would add the adapter to the quantized values."""
    for layer in adapted.modules():
        if isinstance(layer, BaseTunerLayer) and isinstance(layer.get_base_layer(), Fp8Linear):
            layer.merge = MethodType(_merge, layer)


def _merge(layer: LoraLayer, *args: Any, **options: Any) -> Any:
    if not isinstance(layer.get_base_layer(), Fp8Linear):  # the base layer has been dequantized since
        return type(layer).merge(layer, *args, **options)
    what, fix = "an adapter can't be merged into fp8 weights", "finetune merge RUN"
    fix += ", or call model.get_base_model().dequantize(torch.bfloat16) before you merge"
    raise UserError(Problem(what, "model.quantization", found="fp8", fix=fix, code="merge"))


def pack(base: nn.Module) -> None:
    """Pack all fp8 weights so that FSDP can shard them. See `Fp8Linear.pack`."""
    for layer in base.modules():
        if isinstance(layer, Fp8Linear):
            layer.pack()


def _module(model: nn.Module, name: str) -> Any:
    return dict(model.named_modules()).get(name)


def _unread(plain: torch.nn.Module, *, coded: bool) -> Fp8Linear:
    """Create the layer before its weight is read.

    The dtype of the empty weight tells transformers how to read the weight: in the model's dtype before
    quantization, or in fp8.
    """
    assert isinstance(plain, torch.nn.Linear)
    size, dtype = (plain.in_features, plain.out_features), plain.weight.dtype
    fp8_layer = Fp8Linear(*size, bias=plain.bias is not None, compute_dtype=dtype, device="meta")
    if not coded:
        empty = torch.empty(plain.weight.shape, dtype=dtype, device="meta")
        fp8_layer.weight = torch.nn.Parameter(empty, requires_grad=False)
    return fp8_layer


def _plain(layer: Fp8Linear, dtype: torch.dtype | None) -> torch.nn.Linear:
    linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    weight = layer.dequantize().to(dtype or layer.compute_dtype)
    linear.weight, linear.bias = torch.nn.Parameter(weight, requires_grad=False), layer.bias
    return linear
