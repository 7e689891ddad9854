"""Gather sharded tensors of FSDP2 and ZeRO-3, or compute their fingerprints without gathering."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. For a sharded tensor, all processes must call this and exchange data."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if tensor.shape != shape(tensor):
        from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]  (extra)

        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def shape(tensor: torch.Tensor) -> torch.Size:
    """Return the shape of the full tensor. A shard of ZeRO-3 is empty and stores this shape."""
    return getattr(tensor, "ds_shape", tensor.shape)


def in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a trained tensor in fp32 for `sums`. FSDP's tensors stay sharded, ZeRO-3's are gathered."""
    return (tensor if isinstance(tensor, DTensor) else whole(tensor)).float()


def sharded(model: torch.nn.Module) -> bool:
    """Return whether any parameter is sharded."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def give_back(model: torch.nn.Module) -> None:
    """Shard the parameters again that FSDP2 leaves gathered after a forward pass without a backward pass.

    These copies of the outermost modules are in the compute dtype (bf16), but trained weights are in fp32.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Gather the tensors that rank 0 saves of a sharded model, on the CPU.

    All processes must call this. With an adapter, only its tensors and other trained weights are gathered.

    Returns:
        The tensors, which are empty on other ranks; `None` if the model is not sharded.
    """
    give_back(model)
    if not sharded(model):
        return None
    main = torch.distributed.get_rank() == 0
    full, seen = dict[str, torch.Tensor](), set[int]()
    adapter = hasattr(model, "peft_config")
    for name, tensor in model.state_dict(keep_vars=True).items():
        own = "default" in name.split(".")  # its buffers too, such as VeRA's matrices
        if adapter and not own and not tensor.requires_grad:
            continue
        if isinstance(tensor, torch.nn.Parameter):  # a tied head is saved once, a buffer under all its names
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
        tensor_value = whole(tensor).detach()
        full[name] = tensor_value.cpu().clone() if main else tensor_value.new_empty(0, device="cpu")
    return full


def gathered_values(value: object) -> Any:
    """Return a copy of nested dicts and lists with gathered tensors, on the CPU of rank 0.

    All processes must call this. Other ranks get `None` for each tensor.
    """

    def on_main(tensor: torch.Tensor) -> torch.Tensor | None:
        tensor_value = whole(tensor).detach()
        return tensor_value.to("cpu", copy=True) if torch.distributed.get_rank() == 0 else None

    return recursively_apply(on_main, value)


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a full tensor, sharded as `like`; the full tensor if `like` is not."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    there = tensor.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)  # no communication


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return two sums over the bytes of each tensor: a plain sum, and a sum weighted by position.

    Any changed byte changes them. Sharded and full tensors have the same sums: each process sums its shard
    with the positions in the full tensor, and the sums are added over the processes.
    """
    checksums, split = dict[str, tuple[int, int]](), list[str]()
    for name, value in tensors.items():
        tensor = value.detach()  # under ZeRO-3, it loses the marks of a shard
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(0),) and tensor.dim():
            mesh, local = tensor.device_mesh, tensor.to_local()
            rows = -(-tensor.shape[0] // mesh.size())  # of each shard, as torch.chunk divides
            first = min(mesh.get_local_rank() * rows, tensor.shape[0])
            size = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size()
            checksums[name] = _sums(local, first * size)
            split.append(name)
        else:
            checksums[name] = _sums(whole(value).detach(), 0)
    if split:
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, {name: checksums[name] for name in split})
        for name in split:
            checksums[name] = sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)
    return checksums


def _sums(tensor: torch.Tensor, offset: int) -> tuple[int, int]:
    """Return both sums of bytes that start at `offset` in the full tensor."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    # A CPU takes half a minute for 8B weights, and a GPU takes a second. On a CPU, chunks fit in the cache
    # and use fp64, which is faster. It is exact too, because no sum comes near 2**53.
    device = torch.device("cuda") if torch.cuda.is_available() and flat.numel() > 2**24 else flat.device
    size, dtype = (1 << 16, torch.float64) if device.type == "cpu" else (1 << 24, torch.int64)
    positions = torch.arange(1, min(size, flat.numel()) + 1, dtype=dtype, device=device)
    plain = weighted = 0
    for start in range(0, flat.numel(), size):
        chunk = flat[start : start + size].to(device).to(dtype)
        total = int(chunk.sum())
        plain += total
        weighted += int((chunk * positions[: chunk.numel()]).sum()) + (offset + start) * total
    return plain, weighted
