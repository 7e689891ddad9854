"""Quantized base models in fp8 and 4-bit, and quantization-aware training (QAT)."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.quantization.fp8_linear import Fp8Linear as Fp8Linear
    from finetune.quantization.fp8_loading import Fp8BaseConfig as Fp8BaseConfig

__all__ = ["Fp8BaseConfig", "Fp8Linear"]

__getattr__ = lazy_imports(
    __name__, {"Fp8Linear": "fp8_linear.Fp8Linear", "Fp8BaseConfig": "fp8_loading.Fp8BaseConfig"}
)
