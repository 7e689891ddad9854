"""Handle TransformerEngine's layers, which Accelerate puts into a model if the launch asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from finetune.distributed import launch_environment


def used() -> bool:
    """Return whether the launch converts the model's linear layers to TransformerEngine's layers."""
    return launch_environment.fp8().kind == "TE"


@contextlib.contextmanager
def head_kept(model: Any) -> Iterator[None]:
    """Hide the output head from Accelerate in this block, so that it stays a torch layer in bf16.

    Accelerate replaces each linear layer (accelerate 1.15, `convert_model` in utils/transformer_engine.py). A
    tied head would get weights of its own that no optimizer holds, and every head would get an empty bias.
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
    """Return TransformerEngine's layers with fp8 GEMMs. Its LayerNorm has none."""
    modules = (m for m in model.modules() if type(m).__module__.startswith("transformer_engine"))
    return [layer for layer in modules if hasattr(layer, "fp8_meta")]


def rounded(model: nn.Module) -> int:
    """Count TransformerEngine's layers that used fp8 in both forward and backward.

    The state of delayed scaling shows it: histories are 0 and scales are 1 before the first use
    (TransformerEngine 2.20, DelayedScalingRecipeState).
    """
    metadata = [layer.fp8_meta for layer in layers(model)]
    states = [[meta[name] for name in ("scaling_fwd", "scaling_bwd") if name in meta] for meta in metadata]
    moved = [[bool(one.amax_history.any() or (one.scale != 1).any()) for one in both] for both in states]
    return sum(both == [True, True] for both in moved)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict as transformers reads it, without the scaling state of these layers."""
    return {name: t for name, t in model.state_dict().items() if not name.endswith("_extra_state")}
