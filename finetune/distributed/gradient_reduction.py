"""What processes exchange: under data parallelism an adapter's gradients, once a step, in one piece; under
FSDP weights, and in what precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch import nn

    from finetune.core.run_checks import RunChecks


def ours(model: nn.Module) -> bool:
    """Whether `average` exchanges this model's gradients: an adapter's, under data parallelism.

    DDP would do it in the last backward, where a rank that runs out of memory leaves the others waiting. For
    so few bytes, which are ready late in backward, there is little to hide it under: it is the same bytes at
    nearly the same moment, and in one piece costs one start.
    """
    return isinstance(model, DistributedDataParallel) and hasattr(model.module, "peft_config")


@torch.no_grad()
def average(model: nn.Module) -> int:
    """Each gradient, averaged over processes, in one piece: what trains is all of one dtype
    (`trainable_parameters.train_in_fp32`). Returns its bytes.

    Divided before it is summed, as DDP does.
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


def add_receipt(wrapped: Any, exchanged: int, ledger: RunChecks) -> None:
    """Bytes of gradients that were exchanged in the last step: `exchanged` by us, or by DDP's own account."""
    if not isinstance(wrapped, DistributedDataParallel):
        return
    if ours(wrapped):
        ledger.add(
            "gradients exchanged", f"{trained_bytes(wrapped)} bytes", f"{exchanged} bytes", "in one piece"
        )
        return
    data = wrapped._get_ddp_logging_data()
    sizes = str(data.get("rebuilt_bucket_sizes") or data["bucket_sizes"])
    buckets = [int(size) for size in sizes.split(",")]
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    asked = f"{sum(p.nbytes for p in trained)} bytes of {len(trained)} trained tensors"
    got = f"{sum(buckets)} bytes of {data['num_parameter_tensors']} trained tensors"
    how = f"DDP's own account of its buckets: {len(buckets)}"
    ledger.add("gradients exchanged", asked, got, how)
