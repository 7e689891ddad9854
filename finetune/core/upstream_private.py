"""Every use of a private name of another library, in one small function each.

`tests/unit/core/test_upstream_private.py` fails when such a name goes away, or is used elsewhere. Subclasses
of upstream's classes also use the protected names of their base classes. The same test checks these.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    import datetime
    from collections.abc import Callable, Iterator, Sequence

    from jinja2 import Environment
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader
    from transformers import TrainingArguments

    from finetune.core.model_config import ModelConfig

# Imported before a process forks: Inductor, which takes seconds
PRELOADED = "torch._inductor.compile_fx"
# Says of enums that torch knows them by itself now: a message to torchao's developers, at each import
LOGS_ENUMS = "torch.utils._pytree"


def commit_hash(config: ModelConfig) -> str | None:
    """The commit of the Hub from which a model was read."""
    return getattr(config, "_commit_hash", None)


def set_commit_hash(config: ModelConfig, commit: str | None) -> None:
    """transformers no longer does it (5.22)."""
    config._commit_hash = commit


def attention_name(config: ModelConfig) -> str:
    """The name of the attention that a model's layers call."""
    return str(config._attn_implementation)


def set_attention_name(config: ModelConfig, name: str) -> None:
    """As an argument it would yield to the name in config.json, a Hub kernel's name too."""
    config._attn_implementation = name


def experts_name(config: ModelConfig) -> str:
    """The name of the function that a model's experts call."""
    return str(config._experts_implementation)


def is_expert_parallel(module: nn.Module) -> bool:
    """Whether transformers gave this module only a part of the experts."""
    return getattr(module, "_is_expert_parallel", False)


def gate_of(experts: Any) -> Any:
    """The function with which experts multiply the activation of gate by up."""
    return experts._apply_gate


def modules_in_fp32(model: Any) -> list[str]:
    """Parts of the names of weights that transformers keeps in float32 where the rest is in 16 bits."""
    return list(model._keep_in_fp32_modules or ())


def modules_always_in_fp32(model: Any) -> list[str]:
    """Parts of the names of weights that transformers keeps in float32 in any dtype."""
    return list(model._keep_in_fp32_modules_strict or ())


def forget_weight_conversions(model: nn.Module) -> None:
    """Saving would quantize the weights again, without their config.

    transformers 5.22, core_model_loading.py, revert_weight_conversion
    """
    vars(model).pop("_weight_conversions", None)


def checkpoint_function(layer: nn.Module) -> Any:
    """What a checkpointed layer is called through; `None` for another module."""
    return getattr(layer, "_gradient_checkpointing_func", None)


def set_checkpoint_function(layer: Any, function: Callable[..., Any]) -> None:
    layer._gradient_checkpointing_func = function


def chat_template_environment(chat_template_utils: Any) -> Environment:
    """What transformers compiles chat templates with.

    The public function renders too, and takes neither limits nor a date (5.22.2).

    Args:
        chat_template_utils: the module of transformers.
    """
    return chat_template_utils._compile_jinja_template("").environment


def with_reasoning_fields(chat_template_utils: Any, chat: list[Any]) -> list[Any]:
    """A chat whose messages have their reasoning under each name that templates read."""
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    return alias(chat) if alias else chat  # transformers 5.17 has none


def keep_on_one_gpu(arguments: TrainingArguments) -> None:
    """The Trainer would spread one process over all GPUs (DataParallel)."""
    arguments._n_gpu = min(arguments.n_gpu, 1)


def mark_step_skipped(optimizer: Any, skipped: bool) -> None:
    """Let the schedule and AdaLoRA wait, as after an overflow of fp16; `optimizer` is Accelerate's."""
    optimizer._is_overflow = skipped


def launch_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each option of a parser, by the name of its value."""
    return {action.dest: action for action in parser._actions}


def set_rank(lm: Any, rank: int, processes: int) -> None:
    """lm-eval takes a loaded model for one process's. It shares out its requests by these two."""
    lm._rank, lm._world_size = rank, processes


def end_loader_workers(loader: DataLoader[Any]) -> None:
    """End workers that persist."""
    loader._iterator = None


def updates_if_finite(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves its update out where `found_inf` says so: torch's fused ones do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def compile_counters() -> Any:
    """Counters of torch.compile: graphs, graph breaks, recompilations."""
    import torch

    return torch._dynamo.utils.counters


def mark_dynamic(tensor: Tensor) -> None:
    """Let compiled code expect another first size each time."""
    import torch

    torch._dynamo.maybe_mark_dynamic(tensor, 0)


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """torch.compile's settings for decoder layers that are compiled one by one; afterwards as they were.

    Under DDP, torch would cut each layer in two at its first MiB of gradients.
    """
    import torch

    config = torch._dynamo.config
    with config.patch(optimize_ddp=False, recompile_limit=config.recompile_limit):
        yield


def allow_graphs(count: int) -> None:
    """Let `compile_settings` hold so many graphs of one function: above its limit, torch runs eager code
    without a word. Layers may differ by their ranks."""
    import torch

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def recorded_cuda_graphs() -> int:
    """How many CUDA graphs were recorded on the current device."""
    import torch
    from torch._inductor import cudagraph_trees

    manager: Any = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return next(manager.graph_counter) if manager else 0


def cuda_was_used_before_fork() -> bool:
    """Whether this process was forked from one that had a GPU: it can't have one then."""
    import torch

    return torch.cuda._is_in_bad_fork()


def record_memory(*, entries: int | None) -> None:
    """Record each allocation of the GPU; with `None`, stop."""
    import torch

    if entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=entries)


def write_memory_snapshot(path: str) -> None:
    import torch

    torch.cuda.memory._dump_snapshot(path)


def scaled_mm(codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor) -> Tensor:
    """An fp8 matrix product with one scale a row: bfloat16, for rowwise scales come with nothing else."""
    import torch

    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] (a private function of torch)
        codes, weight, scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def operations_through(answer: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside it, `answer(operation, args, options)` runs in place of each of torch's operations."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(func, args, kwargs or {})

    return Mode()


def reads_a_value(operation: Any) -> bool:
    """Whether an operation makes a Python number of a tensor."""
    import torch

    return operation is torch.ops.aten._local_scalar_dense.default


def foreach_mul(one: Sequence[Tensor], other: Sequence[Tensor | None] | float) -> list[Tensor]:
    """Products of tensors one by one. This and the next five take few kernels on a GPU."""
    return _torch()._foreach_mul(one, other)


def foreach_mul_(one: Sequence[Tensor], other: float) -> None:
    _torch()._foreach_mul_(one, other)


def foreach_add_(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    _torch()._foreach_add_(one, other)


def foreach_sub(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return _torch()._foreach_sub(one, other)


def foreach_abs_(one: Sequence[Tensor]) -> None:
    _torch()._foreach_abs_(one)


def foreach_copy_(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    _torch()._foreach_copy_(one, other)


def _torch() -> Any:
    import torch  # its types have no `_foreach_*`

    return torch


def ddp_account(wrapped: DistributedDataParallel) -> dict[str, Any]:
    """What DDP says of its buckets of gradients."""
    return wrapped._get_ddp_logging_data()


def process_groups() -> list[tuple[Any, str]]:
    """Each group of processes, with its backend."""
    from torch.distributed import distributed_c10d

    return [(group, backend) for group, (backend, _) in distributed_c10d._world.pg_map.items()]


def set_group_timeout(timeout: datetime.timedelta, group: Any) -> None:
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)


def replace_own_buffers(module: Any, made: nn.Module) -> None:
    """Give `module` the buffers that `made` computes of itself: those that no file has."""
    for name in made._non_persistent_buffers_set:
        if (buffer := made._buffers[name]) is not None:
            module._buffers[name] = buffer.to(module._buffers[name].device)


def flash_attention_4() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward of FlashAttention-4."""
    from flash_attn.cute import interface  # type: ignore[reportMissingImports]  (GPU only)

    return interface._flash_attn_fwd, interface._flash_attn_bwd
