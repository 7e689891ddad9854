"""A training step of a model, and the difference between two steps."""

from __future__ import annotations

import torch


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    return float((got - expected).norm() / expected.norm())


def step(made: torch.nn.Module, tokens: int = 512) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.arange(tokens, device="cuda").view(2, -1) % 1000
    with torch.autocast("cuda", torch.bfloat16):
        loss = made(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    return float(loss.detach()), gradients


def apart(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """All gradients together, because the gradient of a small tensor is mostly rounding."""
    assert ours.keys() == theirs.keys()
    return error(
        torch.cat([ours[n].flatten() for n in theirs]), torch.cat([theirs[n].flatten() for n in theirs])
    )
