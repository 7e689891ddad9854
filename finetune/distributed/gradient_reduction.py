"""Average an adapter's gradients over processes, and check the number of bytes that were exchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from finetune.core import upstream_private
from finetune.core.run_checks import RunChecks


def ours(model: nn.Module) -> bool:
    """Return whether `average` exchanges this model's gradients, which it does for adapters under DDP.

    DDP itself would exchange them in the last backward pass. A rank that runs out of memory there would leave
    the others waiting. DDP would gain little: an adapter's gradients are few bytes that are ready late in
    backward, so that the exchange hardly overlaps with it.
    """
    return isinstance(model, DistributedDataParallel) and hasattr(model.module, "peft_config")


@torch.no_grad()
def average(model: nn.Module) -> int:
    """Average all gradients over the processes in one all-reduce, and return the number of bytes.

    All trained weights have the same dtype (`trainable_parameters.train_in_fp32`). As in DDP, gradients are
    divided before they are summed.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads: list[Any] = [p.grad for p in trained]
    flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(torch.distributed.get_world_size())
    torch.distributed.all_reduce(flat)
    for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(piece.view_as(grad))
    return flat.nbytes


def trained_bytes(adapted: torch.nn.Module) -> int:
    return sum(p.nbytes for p in adapted.parameters() if p.requires_grad)


def add_run_check(wrapped: nn.Module | None, exchanged: int, checks: RunChecks) -> None:
    """Add a run check of the gradient bytes that the last step exchanged.

    Args:
        exchanged: bytes that `average` exchanged. For other models, DDP's own count is used.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    if ours(wrapped):
        checks.add(
            "gradients all-reduced",
            f"{trained_bytes(wrapped)} bytes",
            f"{exchanged} bytes",
            "averaged in one buffer",
        )
        return
    data = upstream_private.ddp_account(wrapped)
    sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
    buckets = [int(size) for size in sizes.split(",")]
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    checks.add(
        "gradients all-reduced",
        expected=f"{sum(p.nbytes for p in trained)} bytes of {len(trained)} trained tensors",
        actual=f"{sum(buckets)} bytes of {data['num_parameter_tensors']} trained tensors",
        how=f"{len(buckets)} buckets, as DDP reports them",
    )
