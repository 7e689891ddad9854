"""Find layers whose weights a model or a fused kernel reads without a call of the layer.

An adapter on such a layer would not train (`adapters.untrainable_layers`). Quantized weights would be read
as if they were numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.core import packages
from finetune.recipe import upstream_options

if TYPE_CHECKING:
    from finetune.models.module_names import Names


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
