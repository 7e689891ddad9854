"""Models in bitsandbytes' 4-bit formats."""

from typing import Any


def in_four_bits(model: Any, quant_type: str = "nf4", *, nested: bool = True, storage: Any = None) -> Any:
    """A model whose decoder layers are stored by bitsandbytes, as loading it so leaves them."""
    import bitsandbytes as bnb
    import torch
    from torch import nn

    storage = storage or torch.uint8

    for name, plain in model.get_decoder().layers.named_modules():
        if not isinstance(plain, nn.Linear):
            continue
        dtype, device = plain.weight.dtype, plain.weight.device
        made = bnb.nn.Linear4bit(
            plain.in_features, plain.out_features, plain.bias is not None, dtype, nested, quant_type, storage
        )
        made.weight = bnb.nn.Params4bit(
            plain.weight.data,
            compress_statistics=nested,
            quant_type=quant_type,
            quant_storage=storage,
            module=made,
        ).to(device)
        made.bias = plain.bias
        made.support_avx512bf16_for_cpu = False  # as `loading.load` does
        model.get_decoder().layers.set_submodule(name, made.requires_grad_(False))
    model.is_loaded_in_4bit = True  # what PEFT asks
    return model


def without_repacking(model: Any) -> Any:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16, as `loading.load` does."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model
