"""Save and restore this process's shard of ZeRO's state: moments and fp32 weights.

DeepSpeed's own checkpoints are pickles. Here each shard is plain tensors, which rank 0 writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState, init_empty_weights
from accelerate.utils import DistributedType
from transformers.modeling_utils import local_torch_dtype

from finetune.core import upstream_private

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

_KEPT = ("base_optimizer_state", "single_partition_of_fp32_groups")  # names in ZeRO-1 and ZeRO-2
_KEPT += ("optimizer_state_dict", "fp32_flat_groups")  # names in ZeRO-3

_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def used() -> bool:
    return PartialState().distributed_type == DistributedType.DEEPSPEED


def own_buffers(loaded: PreTrainedModel) -> None:
    """Recompute the non-persistent buffers of a model that was loaded under ZeRO-3.

    DeepSpeed's `zero.Init` casts them to 16 bits, including rotary frequencies (deepspeed 0.19.8,
    runtime/zero/partition_parameters.py). Without this, positions differ from a model without DeepSpeed.
    """
    with local_torch_dtype(loaded.dtype), init_empty_weights(include_buffers=False):
        fresh = type(loaded)(loaded.config)
    for name, module in fresh.named_modules():
        upstream_private.replace_own_buffers(loaded.get_submodule(name), module)


def cast(adapted: torch.nn.Module, precision: str) -> None:
    """Cast the trained weights of an adapted model to the launch's 16 bits. DeepSpeed keeps them in fp32 too.

    DeepSpeed does this itself, except for modules that are added to a base model loaded under ZeRO-3. With an
    adapter in fp32, PEFT would cast and keep the input of every layer.

    Args:
        precision: Accelerate's `mixed_precision`.
    """
    if dtype := _HALVES.get(precision):
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)


def state_dict(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer state for a checkpoint, under ZeRO the shard of this process."""
    state = optimizer.state_dict()
    return {name: state[name] for name in _KEPT if name in state} if used() else state


def put_back(optimizer: Any, saved: dict[str, Any]) -> None:
    """Restore the shard of this process. The number of processes must be the same.

    The 16-bit weights of ZeRO-1 and ZeRO-2 are restored separately.

    Args:
        optimizer: Accelerate's wrapper of DeepSpeed's optimizer.
    """
    whole = {**optimizer.state_dict(), **saved}
    copies = [whole] * PartialState().num_processes  # each process reads the item of its rank
    optimizer.optimizer.load_state_dict(copies, load_from_fp32_weights=True)
    inner = optimizer.optimizer.optimizer
    if hasattr(inner, "ds_opt_adam"):
        _count(inner)


def _count(adam: Any) -> None:
    """Advance DeepSpeed's CPU Adam to the step of its restored state.

    Adam multiplies the powers of its betas step by step. A new Adam would compute them with `pow`, which
    rounds differently. So a single number, which stays 0, is updated as many times.
    """
    steps = max((int(state["step"]) for state in adam.state.values()), default=0)
    (beta1, beta2), eps = (adam.param_groups[0][name] for name in ("betas", "eps"))
    number = [torch.zeros(1) for _ in ("weight", "gradient", "exp_avg", "exp_avg_sq")]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, beta1, beta2, eps, 0.0, True, *number)
