"""Optimizers: what one needs, how the Trainer gets it, and what runs, read back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.packages import install_command, install_extra, installed
from finetune.recipe import train_rules

if TYPE_CHECKING:
    from finetune.autoconfig.machine_setup import Setup
    from finetune.recipe.schema import Speed, Train

SMALLEST = 4096  # numbers of a tensor from which bitsandbytes and torchao keep state in 8 or 4 bits
_OF_BITSANDBYTES = re.compile("8bit|32bit|bnb|ademamix")
_OF_TORCHAO = re.compile("adamw_torch_[48]bit")
_EXTRAS = {"torchao": "quantize", "bitsandbytes": "bnb"}
LOW_BITS = re.compile("[48]bit")
# What transformers asks for beside those: by optimizer, the module and its package
_OF_OTHERS = (
    ("galore.*", "galore_torch", "galore-torch"), ("apollo.*", "apollo_torch", "apollo-torch"),
    ("lomo|adalomo", "lomo_optim", "lomo-optim"), ("grokadamw", "grokadamw", "grokadamw"),
    ("stable_adamw", "optimi", "torch-optimi"),
    ("adamw_torch_xla", "torch_xla", "torch_xla"), ("adamw_torch_npu.*", "torch_npu", "torch_npu"),
    ("adamw_anyprecision", "torchdistx", "torchdistx"),
)  # fmt: skip
# Bytes of optimizer state for each number that trains; 8 bits: two moments and a scale for 256 of each
_STATE = (
    (r"adamw_torch_4bit", 1.06), (r".*ademamix_8bit", 3.05), (r".*ademamix.*", 12.0),
    (r".*lion_8bit", 1.02), (r".*lion.*", 4.0), (r"(paged_)?adamw.*8bit", 2.03),
    (r"rmsprop_bnb_8bit", 1.02), (r"rmsprop.*|adagrad", 4.0), (r"adafactor", 0.02), (r"sgd", 0.0),
    (r".*adamw.*", 8.0),
)  # fmt: skip


def asked(train: Train) -> str:
    """`train.optim`, or what it is without."""
    return str(train.passed_on().get("optim", train_rules.DEFAULT))


def unsaved(train: Train, keeper: str) -> str:
    """Why no checkpoints can be made: what keeps state that is not made whole again; empty: they can.

    Args:
        keeper: what splits weights or moments between processes, FSDP or DeepSpeed (ZeRO-2 too), or has state
            of its own: TransformerEngine, DeepSpeed in fp16 or on NVMe.
    """
    optim = asked(train)
    if train_rules.PROJECTS.fullmatch(optim):
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
    needs = [("train.optim", optim, low_bits)] if low_bits else []
    needs += [("train.optim", optim, module) for name, module, _ in _OF_OTHERS if re.fullmatch(name, optim)]
    if speed.offload in ("optimizer", "all"):
        needs.append(("speed.offload", speed.offload, "torchao"))
    distributions = {module: pip for _, module, pip in _OF_OTHERS}
    return [
        Problem(
            f"needs {module}, which is not installed",
            key,
            found=found,
            fix=install_extra(_EXTRAS[module])
            if module in _EXTRAS
            else install_command(distributions[module]),
        )
        for key, found, module in needs
        if not installed(module)
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
    if train_rules.PROJECTS.fullmatch(optim) and not train.passed_on().get("optim_target_modules"):
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
        low = "adamw_torch_8bit" if LOW_BITS.search(optim) else train_rules.DEFAULT
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
