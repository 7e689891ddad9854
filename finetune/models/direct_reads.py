"""Find layers whose weights a model or a fused kernel reads without a call of the layer.

An adapter on such a layer would not train (`adapters.untrainable_layers`). Quantized weights would be read
as if they were numbers.
"""

from __future__ import annotations

import copy

from finetune.core import packages
from finetune.core.model_config import ModelConfig
from finetune.models import module_lists
from finetune.models.module_names import Names
from finetune.quantization import stored_weights
from finetune.recipe import upstream_options


def by_kernels(names: Names) -> dict[str, str]:
    """Return the modules whose weights an installed kernel reads in training: full name -> its package."""
    fused = {
        kind: layer
        for kind, layer in upstream_options.fused_layers(names.family).items()
        if packages.installed(layer.package)
    }
    found = dict[str, str]()
    for name in names.kinds if fused else ():
        owner, _, last = name.rpartition(".")
        layer = fused.get(names.kinds.get(owner, ""))
        if layer and last in layer.reads:
            found[name] = layer.package
    return found


def linear_layers(names: Names) -> list[str]:
    """Return the linear layers whose weights are read directly. They keep their dtype when others are
    quantized.
    """
    direct = {*names.uncalled, *by_kernels(names)}
    return [name for name in names.linear if name in direct]


def kept_modules(config: ModelConfig) -> list[str] | None:
    """Return the modules that keep their dtype in a quantized model; `None` means transformers' own choice.

    Raises:
        Exception: transformers can't build a model from this config.
    """
    if not upstream_options.kernel_packages(config.get_text_config().model_type):
        return None  # only the families with such kernels have layers that are read directly
    from transformers.quantizers.base import get_keys_to_not_convert

    plain = module_lists.of_config(stored_weights.forget(copy.deepcopy(config)))
    direct = linear_layers(module_lists.of_meta_model(plain))
    return [*get_keys_to_not_convert(plain), *direct] if direct else None
