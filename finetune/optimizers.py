"""Optimizers: what one needs, how the Trainer gets it, and what runs, read back."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from finetune.errors import Exit, Problem, UserError, first_line
from finetune.upstream import installed

if TYPE_CHECKING:
    from finetune.hardware import Setup
    from finetune.receipts import Ledger
    from finetune.sections import Speed, Train

DEFAULT = "adamw_torch_fused"
SMALLEST = 4096  # numbers of a tensor from which bitsandbytes and torchao keep state in 8 or 4 bits
_OF_BITSANDBYTES = re.compile("8bit|32bit|bnb|ademamix")
_OF_TORCHAO = re.compile("adamw_torch_[48]bit")
_LOW_BITS = re.compile("[48]bit")
# What transformers asks for beside those: by optimizer, the module and its package
_OF_OTHERS = (
    ("galore.*", "galore_torch", "galore-torch"), ("apollo.*", "apollo_torch", "apollo-torch"),
    ("lomo|adalomo", "lomo_optim", "lomo-optim"), ("grokadamw", "grokadamw", "grokadamw"),
    ("stable_adamw", "optimi", "torch-optimi"),
    ("adamw_torch_xla", "torch_xla", "torch_xla"), ("adamw_torch_npu.*", "torch_npu", "torch_npu"),
    ("adamw_anyprecision", "torchdistx", "torchdistx"),
)  # fmt: skip
PROJECTS = re.compile("(galore|apollo).*")  # gradients, with state that no checkpoint keeps
# Bytes of optimizer state for each number that trains; 8 bits: two moments and a scale for 256 of each
_STATE = (
    (r"adamw_torch_4bit", 1.06), (r".*ademamix_8bit", 3.05), (r".*ademamix.*", 12.0),
    (r".*lion_8bit", 1.02), (r".*lion.*", 4.0), (r"(paged_)?adamw.*8bit", 2.03),
    (r"rmsprop_bnb_8bit", 1.02), (r"rmsprop.*|adagrad", 4.0), (r"adafactor", 0.02), (r"sgd", 0.0),
    (r".*adamw.*", 8.0),
)  # fmt: skip


def asked(train: Train) -> str:
    """`train.optim`, or what it is without."""
    return str(train.passed_on().get("optim", DEFAULT))


def unsaved(train: Train, keeper: str) -> str:
    """Why no checkpoints can be made: what keeps state that is not made whole again; empty: they can.

    Args:
        keeper: what splits weights or moments between processes, FSDP or DeepSpeed (ZeRO-2 too), or has state
            of its own: TransformerEngine, DeepSpeed in fp16 or on NVMe.
    """
    optim = asked(train)
    if PROJECTS.fullmatch(optim):
        return optim
    if keeper not in ("FSDP", "DeepSpeed"):
        return keeper
    return f"{keeper}, under {optim}," if re.search("[48]bit", optim) else ""


def saved_instead(parts: str) -> str:
    """With what checkpoints are made, where `unsaved` says these parts."""
    known = {", under ": "train.optim=adamw_torch_fused", " in fp16": "mixed_precision: bf16 in the launch"}
    known[" on NVMe"] = "offload_optimizer_device and offload_param_device: cpu in the launch"
    known |= dict.fromkeys(("galore", "apollo"), "train.optim=adamw_torch_fused")
    return next((fix for part, fix in known.items() if part in parts), "ddp_8.yaml or fsdp2_8.yaml")


def missing_packages(optim: str, speed: Speed) -> list[Problem]:
    """Packages that the optimizer needs and this environment has not; nothing is imported."""
    low_bits = "torchao" if _OF_TORCHAO.fullmatch(optim) else ""
    low_bits = low_bits or ("bitsandbytes" if _OF_BITSANDBYTES.search(optim) else "")
    extra = {"torchao": "'finetune-toolkit[quantize]'", "bitsandbytes": "'finetune-toolkit[bnb]'"}
    needs = [("train.optim", optim, low_bits, extra.get(low_bits, ""))]
    needs += [
        ("train.optim", optim, module, pip) for name, module, pip in _OF_OTHERS if re.fullmatch(name, optim)
    ]
    if speed.offload in ("optimizer", "all"):
        needs.append(("speed.offload", speed.offload, "torchao", extra["torchao"]))
    return [
        Problem(f"needs {module}, which is not installed", key, found=found, fix=f"pip install {pip}")
        for key, found, module, pip in needs
        if module and not installed(module)
    ]


def problems(train: Train, usual: tuple[float, float] | None) -> list[Problem]:
    """Settings under which no optimizer would train anything, or this one would not be made.

    Args:
        usual: learning rates of the adapter's type.
    """
    found, optim = [], asked(train)
    if train.learning_rate == 0:
        expected = "{:g} to {:g} is usual".format(*usual) if usual else ""
        fix = f"learning_rate: {(usual[0] * usual[1]) ** 0.5 if usual else 2e-4:.0e}"
        what = "nothing is learnt at a rate of 0"
        found.append(Problem(what, "train.learning_rate", found="0", expected=expected, fix=fix))
    if PROJECTS.fullmatch(optim) and not train.passed_on().get("optim_target_modules"):
        what = f"{optim} needs to know which modules' gradients it projects"
        fix = "train.optim_target_modules: all-linear"
        found.append(Problem(what, "train.optim", found=optim, fix=fix))
    return found


def check(train: Train, speed: Speed, setup: Setup) -> None:
    """Whether this machine and launch can do what was asked of the optimizer and of offloading.

    Raises:
        UserError: they can't, or a package is missing (exit 3).
    """
    optim, launch = asked(train), setup.launch
    problems = missing_packages(optim, speed)
    cpu, offload = setup.hardware.device == "cpu", speed.offload
    if offload not in ("auto", "none") and cpu:
        what = "there is no GPU here to take memory off: everything is in the CPU's memory already"
        problems.append(Problem(what, "speed.offload", found=offload, fix="speed.offload: none"))
    elif offload in ("optimizer", "all"):
        without = "activations" if offload == "all" else "none"
        if launch.processes > 1:
            what, found = "torchao's offloaded optimizer is for one process", f"{launch.processes} processes"
            problems.append(Problem(what, "speed.offload", found=found, fix=f"speed.offload: {without}"))
        if launch.precision == "fp16":
            what = "fp16's loss scaler does not see gradients that are in the CPU's memory"
            problems.append(Problem(what, "speed.offload", found=offload, fix=f"speed.offload: {without}"))
    split = launch.splitter == "FSDP" and not _OF_TORCHAO.fullmatch(optim)
    if split and _OF_BITSANDBYTES.search(optim):  # ZeRO hands it plain tensors
        what = "FSDP of the launch splits tensors that bitsandbytes' kernels take whole"
        low = "adamw_torch_8bit" if _LOW_BITS.search(optim) else DEFAULT
        problems.append(Problem(what, "train.optim", found=optim, fix=f"optim: {low}; or ddp_8.yaml"))
    if "paged" in optim and cpu:
        what = "there is no GPU here whose memory could be paged"
        problems.append(Problem(what, "train.optim", found=optim, fix=optim.replace("paged_", "")))
    if problems:
        raise UserError(*problems, code=Exit.ENVIRONMENT)


def known_bytes(optim: str) -> float | None:
    """Bytes of optimizer state for each number that trains; `None` if the optimizer is not known here."""
    return next((size for pattern, size in _STATE if re.fullmatch(pattern, optim)), None)


def state_bytes(optim: str, speed: Speed) -> float:
    """Those on the device; AdamW's two moments of one that is not known."""
    if speed.offload in ("optimizer", "all"):
        return 0.0
    known = known_bytes(optim)
    return 8.0 if known is None else known


def check_schedule(arguments: Any, steps: int) -> None:
    """Make the schedule, and ask it for rates of the whole run, before anything loads.

    Raises:
        UserError: it can't be made or followed, or goes above the peak or below 0 (exit 2).
    """
    from torch import nn, optim
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    stand_in = optim.SGD([nn.Parameter()], lr=arguments.learning_rate)
    name, given = SchedulerType(arguments.lr_scheduler_type).value, arguments.lr_scheduler_kwargs
    warm_up, each = arguments.get_warmup_steps(steps), max(1, steps // 1000)
    try:
        made: Any = get_scheduler(name, stand_in, warm_up, steps, scheduler_specific_kwargs=given)
        rates = [of_peak(step) for of_peak in made.lr_lambdas for step in range(0, steps + 1, each)]
        found = f"{min(rates):g} to {max(rates):g} of it"
        wrong = min(rates) < 0 or max(rates) > 1 + 1e-6
    except (ValueError, TypeError, ArithmeticError) as error:
        found, wrong = first_line(error), True
    if wrong:
        key = "train.lr_scheduler_kwargs" if given else "train.lr_scheduler_type"
        what, expected = f"{name} can't be followed", "rates from 0 to train.learning_rate"
        raise UserError(Problem(what, key, found=found, expected=expected))


def kind_and_options(arguments: Any, adapted: Any, speed: Speed) -> tuple[Any, dict[str, Any]]:
    """The optimizer's class and what it is made with, for the Trainer to make it of its parameter groups.

    Raises:
        UserError: it can't be had here (exit 3).
    """
    from trl.trainer.sft_trainer import SFTTrainer

    try:
        kind, options = SFTTrainer.get_optimizer_cls_and_kwargs(arguments, adapted)
    except (ImportError, ValueError) as error:
        problem = Problem("can't be had here", "train.optim", found=" ".join(str(error).split()))
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
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


def add_receipt(optimizer: Any, optim: str, kind: Any, ledger: Ledger) -> None:
    """What stepped, and what its state is kept in, read from the state after the first step.

    Args:
        optimizer: Accelerate's, around the one that steps.
        kind: the class that `optim` means.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    inner = list(getattr(optimizer, "optim_dict", {}).values())  # torchao's offloaded ones, one a tensor
    all_of_it = inner or [optimizer]
    kinds, held, large = Counter(), Counter(), 0
    for one in all_of_it:
        for parameter, state in one.state.items():
            large += parameter.numel() >= SMALLEST
            kinds[_kept_in(parameter, state)] += 1
            for tensor in _tensors(state):
                held["GPU" if tensor.is_cuda else "CPU"] += tensor.nbytes
    ran = type(all_of_it[0])
    name = f"{ran.__module__.partition('.')[0]}'s {ran.__name__}"
    theirs = ran.__module__.startswith("deepspeed")  # which puts its own around it
    of = ", ".join(f"{kinds[dtype]} tensors in {dtype}" for dtype in sorted(kinds))
    where = ", ".join(f"{held[place] / 2**20:.2f} MiB on the {place}" for place in sorted(held))
    low = sum(count for dtype, count in kinds.items() if dtype.startswith(("uint8", "OptimState")))
    ok = (theirs or ran is kind) and (not _LOW_BITS.search(optim) or bool(low) or not large)
    few = f"; none has {SMALLEST} numbers, from which fewer bits are used" if not large and not low else ""
    how = "the optimizer that stepped, and its state after step 1"
    got = f"{name}, state of {of or 'no tensor'}: {where or '0 MiB'}"
    got += few if _LOW_BITS.search(optim) else ""
    ledger.add("train.optim", optim, got, how, ok=ok, code=Exit.ENVIRONMENT)
    if inner:
        got = f"{sum(map(len, (one.state for one in inner)))} tensors' state: {where}"
        how = "torchao's offloaded optimizer after step 1"
        ok = set(held) == {"CPU"} and len(inner) == sum(len(one.state) for one in inner)
        ledger.add("speed.offload: optimizer", f"{len(inner)} tensors' state on the CPU", got, how, ok=ok)


def _kept_in(parameter: Any, state: dict[str, Any]) -> str:
    """What the moments of a parameter are kept in: a dtype, or torchao's class of fewer bits."""
    moments = [t for t in state.values() if hasattr(t, "dtype") and t.shape == parameter.shape]
    names = {
        type(t).__name__ if hasattr(t, "tensor_attrs") else str(t.dtype).removeprefix("torch.")
        for t in moments
    }
    return " and ".join(sorted(names)) or "nothing"


def _tensors(state: dict[str, Any]) -> list[Any]:
    """The plain tensors of a parameter's state."""
    whole = [t for t in state.values() if hasattr(t, "dtype")]
    parts = [[getattr(t, name) for name in getattr(t, "tensor_attrs", ())] or [t] for t in whole]
    return [tensor for part in parts for tensor in part]
