"""Compare a fused forward with the original one: the allowed difference, and parameters that are not zero."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

# Largest relative difference by dtype, and for dtypes with fewer bits.
ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 2e-2}
ALLOWED_16_BITS = 2e-2


def allowed_difference(dtype: torch.dtype) -> float:
    """Return the largest relative difference of two forwards whose weights have this dtype."""
    return ALLOWED.get(dtype, ALLOWED_16_BITS)


def relative_difference(ours: Tensor, own: Tensor) -> float:
    """Return the norm of the difference of two tensors of the same shape, relative to the norm of `own`."""
    return float((ours - own).float().norm() / own.float().norm())


@contextlib.contextmanager
def changed_parameters(modules: list[nn.Module], generator: torch.Generator) -> Iterator[None]:
    """Add noise to the trainable parameters of modules, and restore them afterwards.

    A new adapter computes zero, so it would hide an error.
    """
    trained = [(p, p.detach().clone()) for one in modules for p in one.parameters() if p.requires_grad]
    with torch.no_grad():  # in place and not on `.data`, so that versions count
        for parameter, _ in trained:
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator).to(parameter)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in trained:
                parameter.copy_(before)
