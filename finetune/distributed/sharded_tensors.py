"""Tensors of which each process has a part (FSDP2, ZeRO-3): whole again, or fingerprinted as they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor. Of a part every process must ask: they exchange theirs."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if tensor.shape != shape(tensor):
        from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]  (extra)

        with GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def shape(tensor: torch.Tensor) -> torch.Size:
    """Of the whole: a part under ZeRO-3 is empty, and knows it."""
    return getattr(tensor, "ds_shape", tensor.shape)


def in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    """A trained tensor to be hashed: whole, or as FSDP splits it, which `sums` reads where it lies."""
    return (tensor if isinstance(tensor, DTensor) else whole(tensor)).float()


def sharded(model: torch.nn.Module) -> bool:
    """Whether any parameter is a part of one."""
    return any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def give_back(model: torch.nn.Module) -> None:
    """Undo what a forward without a backward leaves under FSDP2: the outermost modules' parameters whole, as
    copies in the precision of products (bf16), where what trains is in fp32."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """What rank 0 saves of a split model, on the CPU: of an adapter what is its own, and what else trains.
    `None`: the model is whole.

    All processes call it; on the others the tensors are empty.
    """
    give_back(model)
    if not sharded(model):
        return None
    main = torch.distributed.get_rank() == 0
    found, seen = dict[str, torch.Tensor](), set[int]()
    adapter = hasattr(model, "peft_config")
    for name, tensor in model.state_dict(keep_vars=True).items():
        own = "default" in name.split(".")  # its buffers too, such as VeRA's matrices
        if adapter and not own and not tensor.requires_grad:
            continue
        if isinstance(tensor, torch.nn.Parameter):  # a tied head is saved once, a buffer under all its names
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
        made = whole(tensor).detach()
        found[name] = made.cpu().clone() if main else made.new_empty(0, device="cpu")
    return found


def gathered_values(value: object) -> Any:
    """A copy of `value`, nested dicts and lists, on the CPU of rank 0, with each part of a tensor made whole.

    All processes call it, and the others keep nothing.
    """

    def on_main(tensor: torch.Tensor) -> torch.Tensor | None:
        made = whole(tensor).detach()
        return made.to("cpu", copy=True) if torch.distributed.get_rank() == 0 else None

    return recursively_apply(on_main, value)


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, where `like`, of the same shape, is split; else all of it."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    there = tensor.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)  # none is sent


def sums(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Two sums over the bytes of each tensor, plain and weighted by position, computed where the bytes are.

    Any single changed byte changes them. They are the same whole and in parts: parts of rows are summed where
    they lie, from their own place on, and the sums added up over the processes.
    """
    found, split = dict[str, tuple[int, int]](), list[str]()
    for name, given in tensors.items():
        tensor = given.detach()  # which does not know that it is a part under ZeRO-3
        if isinstance(tensor, DTensor) and tensor.placements == (Shard(0),) and tensor.dim():
            mesh, local = tensor.device_mesh, tensor.to_local()
            rows = -(-tensor.shape[0] // mesh.size())  # of each part, as torch.chunk divides
            first = min(mesh.get_local_rank() * rows, tensor.shape[0])
            size = tensor.numel() // max(tensor.shape[0], 1) * tensor.element_size()
            found[name] = _sums(local, first * size)
            split.append(name)
        else:
            found[name] = _sums(whole(given).detach(), 0)
    if split:
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, {name: found[name] for name in split})
        for name in split:
            found[name] = sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)
    return found


def _sums(tensor: torch.Tensor, offset: int) -> tuple[int, int]:
    """Of bytes that begin at `offset` of the whole."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    # A CPU takes half a minute for 8B weights, a GPU a second. What a CPU's cache holds, in fp64, in which
    # it is faster and as exact: no sum of it comes near 2**53
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
