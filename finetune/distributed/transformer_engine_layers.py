"""What TransformerEngine's layers would do to a model, where the launch has Accelerate put them in it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def used() -> bool:
    """Whether the launch converts the model's linear layers to TransformerEngine's."""
    return launch_environment.fp8().kind == "TE"


@contextlib.contextmanager
def head_kept(model: Any) -> Iterator[None]:
    """While it lasts, what holds the head's weights is no linear layer: it stays torch's, in bf16.

    Accelerate makes each linear layer anew (accelerate 1.15, utils/transformer_engine.py, convert_model). A
    head that is the embeddings would get weights of its own, which no optimizer holds; any an empty bias.
    """
    head = model.get_output_embeddings() if used() else None
    if head is None:
        yield
        return
    holds = torch.nn.Module()
    for name, parameter in head.named_parameters():
        holds.register_parameter(name, parameter)
    model.set_output_embeddings(holds)
    try:
        yield
    finally:
        model.set_output_embeddings(head)


def layers(model: nn.Module) -> list[Any]:
    """Those of TransformerEngine that multiply in fp8; its LayerNorm does not."""
    found = (m for m in model.modules() if type(m).__module__.startswith("transformer_engine"))
    return [layer for layer in found if hasattr(layer, "fp8_meta")]


def rounded(model: nn.Module) -> int:
    """Layers of TransformerEngine that rounded to fp8 forward and backward, by what delayed scaling keeps of
    inputs, weights and gradients (2.20, DelayedScalingRecipeState): zeros and ones until then."""
    kept = [layer.fp8_meta for layer in layers(model)]
    states = [[meta[name] for name in ("scaling_fwd", "scaling_bwd") if name in meta] for meta in kept]
    moved = [[bool(one.amax_history.any() or (one.scale != 1).any()) for one in both] for both in states]
    return sum(both == [True, True] for both in moved)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, as transformers reads it: without the largest values that these layers remember."""
    return {name: t for name, t in model.state_dict().items() if not name.endswith("_extra_state")}
