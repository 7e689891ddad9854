"""Use private names of other libraries, each in one small function.

`tests/unit/core/test_upstream_private.py` fails if a name disappears or if other code uses one. Subclasses of
upstream classes also use protected names of their base classes. The same test checks these.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    import datetime
    from argparse import Action, ArgumentParser
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    import torch.distributed as dist
    from accelerate.optimizer import AcceleratedOptimizer
    from jinja2 import Environment
    from lm_eval.api.model import LM
    from peft import PeftModel
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader
    from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments

    from finetune.core.model_config import ModelConfig

# Inductor, which is imported before a process forks, because the import takes seconds
PRELOADED = "torch._inductor.compile_fx"
# The logger of a message to torchao's developers, which appears at each import
LOGS_ENUMS = "torch.utils._pytree"


def _torch() -> Any:
    """Return torch, whose types lack private names."""
    import torch

    return torch


def commit_hash(config: ModelConfig) -> str | None:
    """Return the Hub commit that a model was loaded from."""
    return getattr(config, "_commit_hash", None)


def set_commit_hash(config: ModelConfig, commit: str | None) -> None:
    """Set the Hub commit of a config, because transformers 5.22 no longer sets it."""
    config._commit_hash = commit


def attention_name(config: ModelConfig) -> str:
    """Return the name of the attention implementation that a model's layers call."""
    return str(config._attn_implementation)


def set_attention_name(config: ModelConfig, name: str) -> None:
    """Set the attention implementation in the config.

    As an argument of `from_pretrained`, config.json could override it, even with the name of a Hub kernel.
    """
    config._attn_implementation = name


def forget_quantization(config: PreTrainedConfig) -> None:
    """Remove transformers' mark of a quantized model, with which some layers choose another forward pass."""
    vars(config).pop("_is_quantized", None)


def experts_name(config: ModelConfig) -> str:
    """Return the name of the function that a model's experts call."""
    return str(config._experts_implementation)


def is_expert_parallel(module: nn.Module) -> bool:
    """Return whether this module holds only a part of the experts (expert parallelism)."""
    return getattr(module, "_is_expert_parallel", False)


def gate_of(experts: Any) -> Any:
    """Return the function of experts that multiplies the activation of the gate by the up projection."""
    return experts._apply_gate


def modules_in_fp32(model: PreTrainedModel | PeftModel) -> list[str]:
    """Return name parts of weights that transformers keeps in float32 in a 16-bit model."""
    return list(model._keep_in_fp32_modules or ())


def modules_always_in_fp32(model: PreTrainedModel | PeftModel) -> list[str]:
    """Return name parts of weights that transformers keeps in float32 for every dtype."""
    return list(model._keep_in_fp32_modules_strict or ())


def forget_weight_conversions(model: nn.Module) -> None:
    """Prevent that `save_pretrained` quantizes the weights again, without their config.

    See `revert_weight_conversion` in core_model_loading.py (transformers 5.22).
    """
    vars(model).pop("_weight_conversions", None)


def checkpoint_function(layer: nn.Module) -> Any:
    """Return the function that calls a layer with activation checkpointing; `None` for other modules."""
    return getattr(layer, "_gradient_checkpointing_func", None)


def set_checkpoint_function(layer: Any, function: Callable[..., Any]) -> None:
    layer._gradient_checkpointing_func = function


def chat_template_environment(chat_template_utils: ModuleType) -> Environment:
    """Return the Jinja environment in which transformers compiles chat templates.

    The public function also renders, and it accepts neither limits nor a date (5.22.2).

    Args:
        chat_template_utils: the module of transformers.
    """
    return chat_template_utils._compile_jinja_template("").environment


def with_reasoning_fields(chat_template_utils: ModuleType, chat: list[Any]) -> list[Any]:
    """Return a chat whose messages have their reasoning under each name that templates read."""
    alias = getattr(chat_template_utils, "_alias_reasoning_fields", None)
    return alias(chat) if alias else chat  # transformers 5.17 has no such function


def keep_on_one_gpu(arguments: TrainingArguments) -> None:
    """Keep the Trainer from using all GPUs in one process (DataParallel)."""
    arguments._n_gpu = min(arguments.n_gpu, 1)


def mark_step_skipped(optimizer: AcceleratedOptimizer, skipped: bool) -> None:
    """Make the schedule and AdaLoRA skip a step, as after an fp16 overflow. `optimizer` is Accelerate's."""
    optimizer._is_overflow = skipped


def launch_options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Return each option of a parser by the name of its value."""
    return {action.dest: action for action in parser._actions}


def set_rank(lm: LM, rank: int, processes: int) -> None:
    """Set the rank and the number of processes of a loaded model, by which lm-eval divides its requests."""
    lm._rank, lm._world_size = rank, processes


def end_loader_workers(loader: DataLoader[Any]) -> None:
    """End the persistent workers of a data loader."""
    loader._iterator = None


def updates_if_finite(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips its update if `found_inf` is set, as torch's fused optimizers do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module runs hooks of its forward or backward pass."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    return bool(before or after or module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def compile_counters() -> Any:
    """Return the counters of torch.compile: graphs, graph breaks and recompilations."""
    return _torch()._dynamo.utils.counters


def mark_dynamic(tensor: Tensor) -> None:
    """Tell torch.compile that the first dimension changes between calls."""
    _torch()._dynamo.maybe_mark_dynamic(tensor, 0)


@contextlib.contextmanager
def compile_settings() -> Iterator[None]:
    """Change torch.compile's settings for decoder layers that are compiled one by one, and restore them.

    Under DDP, torch would otherwise split each layer after its first MiB of gradients.
    """
    config = _torch()._dynamo.config
    with config.patch(optimize_ddp=False, recompile_limit=config.recompile_limit):
        yield


def allow_graphs(count: int) -> None:
    """Allow `count` graphs of one function within `compile_settings`.

    Above its limit, torch runs eager code without a message. Layers with different adapter ranks need
    different graphs.
    """
    config = _torch()._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)


def actions_of(parser: ArgumentParser) -> list[Action]:
    """Return the options and arguments of an argparse parser."""
    return parser._actions


def mark_static_address(tensor: Tensor) -> None:
    """Tell CUDA graphs to read a tensor where it is. They copy each other input that is no parameter."""
    _torch()._dynamo.mark_static_address(tensor)


def recorded_cuda_graphs() -> int:
    """Return how many CUDA graphs were recorded on the current device."""
    import torch
    from torch._inductor import cudagraph_trees

    manager: Any = cudagraph_trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return next(manager.graph_counter) if manager else 0


def cuda_was_used_before_fork() -> bool:
    """Return whether this process can't use CUDA, because its parent used it before the fork."""
    return _torch().cuda._is_in_bad_fork()


def record_memory(*, entries: int | None) -> None:
    """Record each memory allocation of the GPU. With `None`, stop recording."""
    if entries is None:
        _torch().cuda.memory._record_memory_history(enabled=None)
    else:
        _torch().cuda.memory._record_memory_history(max_entries=entries)


def write_memory_snapshot(path: str) -> None:
    _torch().cuda.memory._dump_snapshot(path)


def scaled_mm(
    codes: Tensor, weight: Tensor, scale: Tensor, weight_scale: Tensor, *, fast: bool = True
) -> Tensor:
    """Multiply fp8 matrices with one scale per row. The result is bfloat16, because torch allows no other.

    Args:
        fast: whether sums may have fewer bits than float32.
    """
    import torch

    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage] (a private function of torch)
        codes, weight, scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def operations_through(answer: Callable[..., Any]) -> contextlib.AbstractContextManager[Any]:
    """Within the context, call `answer(operation, args, options)` instead of each operation of torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Callable[..., Any], types: object, args: object = (), kwargs: object = None
        ) -> Any:
            return answer(func, args, kwargs or {})

    return Mode()


def reference_layers() -> contextlib.AbstractContextManager[None]:
    """Run layers of transformers in PyTorch within the context, not in the kernels of other packages.

    transformers does so while `torch.export` runs. The kernels accept no tensors without values.
    """
    from torch._export.utils import _compiling_state_context

    return _compiling_state_context()


def reads_a_value(operation: object) -> bool:
    """Return whether an operation converts a tensor to a Python number."""
    return operation is _torch().ops.aten._local_scalar_dense.default


def foreach_mul(one: Sequence[Tensor], other: Sequence[Tensor | None] | float) -> list[Tensor]:
    """Multiply lists of tensors elementwise. This and the next five functions launch few kernels on a GPU."""
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


def ddp_account(wrapped: DistributedDataParallel) -> dict[str, Any]:
    """Return what DDP reports about its gradient buckets."""
    return wrapped._get_ddp_logging_data()


def process_groups() -> list[tuple[Any, str]]:
    """Return each process group and its backend."""
    from torch.distributed import distributed_c10d

    return [(group, backend) for group, (backend, _) in distributed_c10d._world.pg_map.items()]


def set_group_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a process group."""
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timeout, group)


def replace_own_buffers(module: Any, fresh: nn.Module) -> None:
    """Copy the non-persistent buffers, which no file has, from `fresh` to `module`."""
    for name in fresh._non_persistent_buffers_set:
        if (buffer := fresh._buffers[name]) is not None:
            module._buffers[name] = buffer.to(module._buffers[name].device)


def flash_attention_4() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the backward function of FlashAttention-4."""
    from flash_attn.cute import interface  # type: ignore[reportMissingImports]  (GPU only)

    return interface._flash_attn_fwd, interface._flash_attn_bwd
