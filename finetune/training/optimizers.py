"""Build the optimizer (LoRA+ too: arXiv 2402.12354), check the schedule, read the state back."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.sft_config import SFTConfig

from finetune.adapters import trainable_parameters
from finetune.autoconfig import optimizer_choice
from finetune.core import formatting
from finetune.core.errors import Exit, Problem, UserError, first_line
from finetune.core.run_checks import RunChecks
from finetune.recipe.schema import Adapter, Speed


class OptimizerChoice(NamedTuple):
    """The recipe's optimizer: an instance for LoRA+, or a class and options for the Trainer."""

    kind_and_options: tuple[Any, dict[str, Any]]
    instance: Optimizer | None = None

    @property
    def kind(self) -> Any:
        """The class of the optimizer that steps, which is an option of torchao's offloaded optimizer."""
        kind, options = self.kind_and_options
        return options.get("optimizer_class", kind)


def choose(
    arguments: SFTConfig, adapted: PreTrainedModel | PeftModel, adapter: Adapter, speed: Speed
) -> OptimizerChoice:
    """Return the optimizer of a run.

    Raises:
        UserError: the optimizer is not available (exit 3).
    """
    kind_with_options, ratio = kind_and_options(arguments, adapted, speed), adapter.ours("loraplus_lr_ratio")
    optimizer = (
        loraplus_optimizer(adapted, kind_with_options, ratio, arguments.weight_decay) if ratio else None
    )
    return OptimizerChoice(kind_with_options, optimizer)


def loraplus_optimizer(
    adapted: PreTrainedModel | PeftModel, made_by: tuple[Any, dict[str, Any]], ratio: float, decay: float
) -> Optimizer:
    """Build the recipe's optimizer for LoRA+: the learning rate of B is `ratio` times the rate of A.

    One-dimensional weights, such as DoRA's magnitudes, have the rate of B.

    Args:
        made_by: the class and options from `optimizers.kind_and_options`.
        decay: weight decay.
    """
    from peft.optimizers import create_loraplus_optimizer

    kind, options = made_by[0], dict(made_by[1])
    rate = options.pop("lr")
    optimizer = create_loraplus_optimizer(
        cast("PeftModel", adapted),
        kind,
        lr=rate,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=decay,
        loraplus_lr_embedding=rate,  # with PEFT's 1e-6, LoRA on embeddings would not train
        **options,
    )
    if options.get("optim_bits") == 8:  # as the Trainer does; PEFT only for classes that are named so
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        for module in adapted.modules():
            if isinstance(module, nn.Embedding):
                GlobalOptimManager.get_instance().register_module_override(
                    module, "weight", {"optim_bits": 32}
                )
    return optimizer


def add_loraplus_check(
    adapted: nn.Module, optimizer: Any, rate: float, ratio: float, checks: RunChecks
) -> None:
    """Add a run check of the learning rates of A and B in the optimizer. `rate` is the peak rate."""
    groups = optimizer.param_groups
    rates = {id(p): float(group.get("initial_lr", group["lr"])) for group in groups for p in group["params"]}
    fast, slow, other = set(), set(), set()
    for name, parameter in trainable_parameters.trainable(adapted).items():
        faster = ".lora_B." in name or parameter.ndim == 1
        (fast if faster else slow if "lora_" in name else other).add(rates.get(id(parameter)))
    actual = f"A {_said(slow)}, B {_said(fast)}" + (f", others {_said(other)}" if other else "")
    expected = f"A {rate:g}, B {rate * ratio:g}" + (f", others {rate:g}" if other else "")
    checks.add("adapter.loraplus_lr_ratio", expected, actual, "peak rates in the optimizer's groups")


def _said(rates: set[float | None]) -> str:
    return ", ".join("not in the optimizer" if rate is None else f"{rate:g}" for rate in rates)


def check_schedule(arguments: Any, steps: int) -> None:
    """Build the schedule, and check its learning rates for the whole run before anything loads.

    Raises:
        UserError: the schedule raises an error, or goes above the peak or below 0 (exit 2).
    """
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    stand_in = torch.optim.SGD([nn.Parameter()], lr=arguments.learning_rate)
    name, kwargs = SchedulerType(arguments.lr_scheduler_type).value, arguments.lr_scheduler_kwargs
    warm_up, stride = arguments.get_warmup_steps(steps), max(1, steps // 1000)
    what = f"the schedule {name} gives learning rates below 0 or above the peak"
    try:
        schedule: Any = get_scheduler(name, stand_in, warm_up, steps, scheduler_specific_kwargs=kwargs)
        rates = [of_peak(step) for of_peak in schedule.lr_lambdas for step in range(0, steps + 1, stride)]
        found = f"{min(rates):g} to {max(rates):g} times train.learning_rate"
        wrong = min(rates) < 0 or max(rates) > 1 + 1e-6
    except (ValueError, TypeError, ArithmeticError) as error:
        what, found, wrong = (
            f"the schedule {name} raises an error with these options",
            first_line(error),
            True,
        )
    if wrong:
        raise UserError(
            Problem(
                what,
                "train.lr_scheduler_kwargs" if kwargs else "train.lr_scheduler_type",
                found=found,
                expected="0 to 1 times train.learning_rate",
                fix="train.lr_scheduler_type: cosine",
                code="value-range",
            )
        )


def kind_and_options(arguments: SFTConfig, adapted: Any, speed: Speed) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer's class and options, from which the Trainer builds it with its parameter groups.

    Raises:
        UserError: the optimizer is not available (exit 3).
    """
    from trl.trainer.sft_trainer import SFTTrainer

    try:
        kind, options = SFTTrainer.get_optimizer_cls_and_kwargs(arguments, adapted)
    except (ImportError, ValueError) as error:
        raise UserError(
            Problem(
                f"the optimizer {arguments.optim} is not available",
                "train.optim",
                why=" ".join(str(error).split()),
                fix="train.optim: adamw_torch_fused",
                code="package-missing",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    if getattr(kind, "__module__", "").startswith("bitsandbytes"):
        from bitsandbytes.optim.optimizer import GlobalOptimManager

        # by index of group and parameter, so those of this process's last run would hold for this one
        GlobalOptimManager.get_instance().initialize()
    if speed.offload in ("optimizer", "all"):
        from torchao.optim import CPUOffloadOptimizer

        # Small tensors too: those it leaves to the GPU lose the schedule in `accelerator.prepare`, which puts
        # the state back, for their groups are then others than those it shows (torchao 0.18)
        return CPUOffloadOptimizer, {"optimizer_class": kind, "minimal_size": 0, **options}
    return kind, options


def add_run_check(optimizer: Optimizer, optim: str, kind: object, checks: RunChecks) -> None:
    """Add run checks of the optimizer and the dtypes of its state after the first step.

    Args:
        optimizer: Accelerate's wrapper of the optimizer.
        kind: the class that `optim` means.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    inner = list(
        getattr(optimizer, "optim_dict", {}).values()
    )  # torchao's offloaded optimizers, one per tensor
    all_of_it = inner or [optimizer]
    kinds, bytes_by_device, large = Counter(), Counter(), 0
    for one in all_of_it:
        for parameter, state in one.state.items():
            large += parameter.numel() >= optimizer_choice.SMALLEST
            kinds[_kept_in(parameter, state)] += 1
            for tensor in _tensors(state):
                bytes_by_device["GPU" if tensor.is_cuda else "CPU"] += tensor.nbytes
    optimizer_class = type(all_of_it[0])
    name = f"{optimizer_class.__module__.partition('.')[0]}'s {optimizer_class.__name__}"
    theirs = optimizer_class.__module__.startswith("deepspeed")  # DeepSpeed wraps the optimizer
    of = ", ".join(f"{kinds[dtype]} tensors in {dtype}" for dtype in sorted(kinds))
    where = ", ".join(
        f"{formatting.size(bytes_by_device[place])} on the {place}" for place in sorted(bytes_by_device)
    )
    low = sum(count for dtype, count in kinds.items() if dtype.startswith(("uint8", "OptimState")))
    ok = (theirs or optimizer_class is kind) and (
        not optimizer_choice.LOW_BITS.search(optim) or bool(low) or not large
    )
    few = (
        f"; none has the {optimizer_choice.SMALLEST} elements from which fewer bits are used"
        if not large and not low
        else ""
    )
    actual = f"{name}, state of {of or 'no tensor'}: {where or '0 MiB'}"
    actual += few if optimizer_choice.LOW_BITS.search(optim) else ""
    checks.add(
        "train.optim",
        expected=optim,
        actual=actual,
        how="the optimizer that stepped, and its state after step 1",
        ok=ok,
        code=Exit.ENVIRONMENT,
    )
    if inner:
        actual = f"{sum(map(len, (one.state for one in inner)))} tensors' state: {where}"
        ok = set(bytes_by_device) == {"CPU"} and len(inner) == sum(len(one.state) for one in inner)
        checks.add(
            "speed.offload: optimizer",
            expected=f"{len(inner)} tensors' state on the CPU",
            actual=actual,
            how="torchao's offloaded optimizer after step 1",
            ok=ok,
        )


def _kept_in(parameter: Tensor, state: dict[str, Any]) -> str:
    """Return the type of a parameter's moments: a dtype, or torchao's class with fewer bits."""
    moments = [t for t in state.values() if hasattr(t, "dtype") and t.shape == parameter.shape]
    names = {
        type(t).__name__ if hasattr(t, "tensor_attrs") else str(t.dtype).removeprefix("torch.")
        for t in moments
    }
    return " and ".join(sorted(names)) or "nothing"


def _tensors(state: dict[str, Any]) -> list[Any]:
    """Return the plain tensors of a parameter's state."""
    whole = [t for t in state.values() if hasattr(t, "dtype")]
    parts = [[getattr(t, name) for name in getattr(t, "tensor_attrs", ())] or [t] for t in whole]
    return [tensor for part in parts for tensor in part]


class SendGradients(TrainerCallback):
    """Copy the clipped gradients for torchao's CPUOffloadOptimizer.

    It copies each gradient to the CPU during the backward pass, before `max_grad_norm` clips it. So finetune
    copies the gradients again after clipping, on the same stream and in the same order. The step of one
    tensor on the CPU runs at the same time as the copy of the next tensor.
    """

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.max_grad_norm:
            return
        wrapped = kwargs["optimizer"]
        optimizer = getattr(wrapped, "optimizer", wrapped)
        optimizer.stream.wait_stream(torch.cuda.current_stream())
        for parameter in list(optimizer.queue):
            with torch.cuda.stream(optimizer.stream):
                optimizer.param_d2h_map[parameter].grad.copy_(parameter.grad, non_blocking=True)
            optimizer.queue[parameter] = optimizer.stream.record_event()
