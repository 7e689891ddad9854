"""Count the tokens of each expert over a run, and name the experts that received none."""

from __future__ import annotations

import re
from typing import Any

import torch
from accelerate import Accelerator

from finetune.core.formatting import listed
from finetune.core.run_checks import RunChecks

TOKENS = "expert_tokens"  # the key of `Trainer.sums`: the tokens of each expert [routers, experts]
LISTED = 5  # layers that a message names


def utilization(accelerator: Any, tokens: torch.Tensor) -> float | None:
    """Return the share of experts that received a token in any process; `None` if the routers do not say."""
    if not tokens.numel():
        return None
    return float((accelerator.reduce(tokens, "sum") > 0).double().mean())


def add_check(accelerator: Accelerator, counted: object, routers: list[str], checks: RunChecks) -> str:
    """Record how many experts received tokens in training.

    Args:
        counted: the tokens of each expert in this process; another value: nobody has counted them.
        routers: the names of the routers, as `describe_idle` takes them.

    Returns:
        A warning about experts without a token; the empty string if there are none.
    """
    if not isinstance(counted, torch.Tensor) or not counted.numel():
        return ""
    tokens: Any = accelerator.reduce(counted, "sum")
    idle = describe_idle(tokens.cpu(), routers)
    used, every = int((tokens > 0).sum()), tokens.numel()
    actual = f"{used:,} of {every:,} experts" + (f"; without a token: {idle}" if idle else "")
    checks.add(
        "experts that received tokens",
        expected=f"{every:,} experts",
        actual=actual,
        how="tokens of each expert, counted over the training steps",
        ok=used > 0,
    )
    what = f"{every - used:,} of {every:,} experts received no token in training"
    return f"{what}: {idle}. An adapter on them did not change" if idle else ""


def describe_idle(tokens: torch.Tensor, routers: list[str]) -> str:
    """Return the experts without a token by layer; the empty string if there are none.

    Args:
        tokens: [routers, experts].
        routers: the names of the routers, such as `layers.3.mlp.gate`.
    """
    found = list[str]()
    for name, counts in zip(routers, tokens, strict=True):
        if idle := (counts == 0).nonzero().flatten().tolist():
            layer = re.search(r"\d+", name)
            found.append(f"layer {layer[0] if layer else name}: {listed(list(map(str, idle)), 8)}")
    more = f"; and {len(found) - LISTED} more layers" if len(found) > LISTED else ""
    return "; ".join(found[:LISTED]) + more
