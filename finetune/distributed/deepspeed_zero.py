"""What DeepSpeed's ZeRO keeps for this process: its part of the moments, and of the weights in fp32.

DeepSpeed's own checkpoints are pickles; here each process's part is plain tensors, which rank 0 writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import DistributedType
from transformers.modeling_utils import local_torch_dtype

if TYPE_CHECKING:
    from torch.optim import Optimizer

_KEPT = ("base_optimizer_state", "single_partition_of_fp32_groups")  # ZeRO-1's and 2's names; then ZeRO-3's
_KEPT += ("optimizer_state_dict", "fp32_flat_groups")

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def used() -> bool:
    return PartialState().distributed_type == DistributedType.DEEPSPEED


def own_buffers(loaded: Any) -> None:
    """Make anew the buffers that a model computes of itself, which ZeRO-3 split while it was loaded.

    DeepSpeed's `zero.Init` rounds them to the weights' 16 bits, rotary frequencies too (deepspeed 0.19.8,
    runtime/zero/partition_parameters.py): positions would be others than where it is read without DeepSpeed.
    """
    with local_torch_dtype(loaded.dtype), init_empty_weights(include_buffers=False):
        made = type(loaded)(loaded.config)
    for name, module in made.named_modules():
        held: Any = loaded.get_submodule(name)
        for leaf in module._non_persistent_buffers_set:
            if (buffer := module._buffers[leaf]) is not None:
                held._buffers[leaf] = buffer.to(held._buffers[leaf].device)


def cast(adapted: torch.nn.Module, precision: str) -> None:
    """Give what trains of an adapted model the launch's 16 bits, beside which DeepSpeed keeps fp32: so it
    does itself, but for what was added to a base that ZeRO-3 split while it was loaded. In fp32 there, an
    adapter would have PEFT cast and keep the input of every layer.

    Args:
        precision: Accelerate's `mixed_precision`.
    """
    if dtype := _HALVES.get(precision):
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """What a checkpoint keeps of an optimizer: under ZeRO of this process's part."""
    found = optimizer.state_dict()
    return {name: found[name] for name in _KEPT if name in found} if used() else found


def put_back(optimizer: Any, kept: dict[str, Any]) -> None:
    """The part that this process had, of as many. ZeRO-1's and 2's weights that multiply are put back apart.

    Args:
        optimizer: Accelerate's, around DeepSpeed's.
    """
    whole = {**optimizer.state_dict(), **kept}
    each = [whole] * PartialState().num_processes  # of which each process takes its own
    optimizer.optimizer.load_state_dict(each, load_from_fp32_weights=True)
    inner = optimizer.optimizer.optimizer
    if hasattr(inner, "ds_opt_adam"):
        _count(inner)


def _count(adam: Any) -> None:
    """Have DeepSpeed's Adam of the CPU come as far as its state: it multiplies powers of its betas step by
    step, and begun anew takes them by `pow`, a rounding off. One number, which stays 0, makes those steps."""
    steps = max((int(state["step"]) for state in adam.state.values()), default=0)
    (beta1, beta2), eps = (adam.param_groups[0][name] for name in ("betas", "eps"))
    number = [torch.zeros(1) for _ in ("weight", "gradient", "exp_avg", "exp_avg_sq")]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, *number)
