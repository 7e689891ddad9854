"""Check an optimizer: its packages, its settings, the launch, its checkpoints and the size of its state."""

from __future__ import annotations

import re

from finetune.autoconfig.machine_setup import Setup
from finetune.core.errors import Exit, Problem, raise_if_any
from finetune.core.packages import install_command, install_extra, installed
from finetune.recipe import train_rules
from finetune.recipe.schema import Speed, Train

# Elements of a tensor from which bitsandbytes and torchao keep its state in 8 or 4 bits.
SMALLEST = 4096
_OF_BITSANDBYTES = re.compile("8bit|32bit|bnb|ademamix")
_OF_TORCHAO = re.compile("adamw_torch_[48]bit")
_EXTRAS = {"torchao": "quantize", "bitsandbytes": "bnb"}
LOW_BITS = re.compile("[48]bit")
# Other packages that transformers needs: optimizer, module and package.
_OF_OTHERS = (
    ("galore.*", "galore_torch", "galore-torch"), ("apollo.*", "apollo_torch", "apollo-torch"),
    ("lomo|adalomo", "lomo_optim", "lomo-optim"), ("grokadamw", "grokadamw", "grokadamw"),
    ("stable_adamw", "optimi", "torch-optimi"),
    ("adamw_torch_xla", "torch_xla", "torch_xla"), ("adamw_torch_npu.*", "torch_npu", "torch_npu"),
    ("adamw_anyprecision", "torchdistx", "torchdistx"),
)  # fmt: skip
# Bytes of optimizer state per trainable parameter. In 8 bits: two moments, each with a scale per 256 values.
_STATE = (
    (r"adamw_torch_4bit", 1.06), (r".*ademamix_8bit", 3.05), (r".*ademamix.*", 12.0),
    (r".*lion_8bit", 1.02), (r".*lion.*", 4.0), (r"(paged_)?adamw.*8bit", 2.03),
    (r"rmsprop_bnb_8bit", 1.02), (r"rmsprop.*|adagrad", 4.0), (r"adafactor", 0.02), (r"sgd", 0.0),
    (r".*adamw.*", 8.0),
)  # fmt: skip


def asked(train: Train) -> str:
    """Return `train.optim` or its default."""
    return str(train.passed_on().get("optim", train_rules.DEFAULT))


def unsaved(train: Train, keeper: str) -> str:
    """Return the optimizer or library whose state a checkpoint can't save; the empty string if there is none.

    Args:
        keeper: `Launch.keeper`, the library that shards state or holds state of its own.
    """
    optim = asked(train)
    if train_rules.PROJECTS.fullmatch(optim):
        return optim
    if keeper not in ("FSDP", "DeepSpeed"):
        return keeper
    return f"{keeper}, under {optim}," if re.search("[48]bit", optim) else ""


def saved_instead(parts: str) -> str:
    """Suggest a setting that makes checkpoints possible.

    Args:
        parts: the result of `unsaved`.
    """
    known = {
        ", under ": "train.optim=adamw_torch_fused",
        " in fp16": "mixed_precision: bf16 in the launch",
        " on NVMe": "offload_optimizer_device and offload_param_device: cpu in the launch",
        **dict.fromkeys(("galore", "apollo"), "train.optim=adamw_torch_fused"),
    }
    return next((fix for part, fix in known.items() if part in parts), "ddp_8.yaml or fsdp2_8.yaml")


def missing_packages(optim: str, speed: Speed) -> list[Problem]:
    """Return the problems of missing packages that the optimizer needs, without an import."""
    low_bits = "torchao" if _OF_TORCHAO.fullmatch(optim) else ""
    low_bits = low_bits or ("bitsandbytes" if _OF_BITSANDBYTES.search(optim) else "")
    needs = [("train.optim", optim, low_bits)] if low_bits else []
    needs += [("train.optim", optim, module) for name, module, _ in _OF_OTHERS if re.fullmatch(name, optim)]
    if speed.offload in ("optimizer", "all"):
        needs.append(("speed.offload", speed.offload, "torchao"))
    distributions = {module: pip for _, module, pip in _OF_OTHERS}
    return [
        Problem(
            f"{value} needs the package {module}, which is not installed",
            key,
            found=value,
            fix=install_extra(_EXTRAS[module])
            if module in _EXTRAS
            else install_command(distributions[module]),
            code="package-missing",
        )
        for key, value, module in needs
        if not installed(module)
    ]


def check_settings(train: Train, usual: tuple[float, float] | None) -> list[Problem]:
    """Return the problems of settings that train nothing or that the optimizer does not accept.

    Args:
        usual: the usual range of learning rates of the adapter type; `None`: not known.
    """
    problems_found, optim = [], asked(train)
    if train.learning_rate == 0:
        expected = "a value such as {:g} to {:g}".format(*usual) if usual else "a value larger than 0"
        key, what = "train.learning_rate", "a learning rate of 0 trains nothing"
        problems_found.append(
            Problem(
                what,
                key,
                found="0",
                expected=expected,
                fix=f"{key}: {(usual[0] * usual[1]) ** 0.5 if usual else 2e-4:.0e}",
                code="value-range",
            )
        )
    if train_rules.PROJECTS.fullmatch(optim) and not train.passed_on().get("optim_target_modules"):
        problems_found.append(
            Problem(
                f"{optim} needs train.optim_target_modules, the modules whose gradients it projects",
                "train.optim",
                found=optim,
                fix="train.optim_target_modules: all-linear",
                code="missing-key",
            )
        )
    return problems_found


def check(train: Train, speed: Speed, setup: Setup) -> None:
    """Check that this machine and launch support the optimizer and offloading.

    Raises:
        UserError: they don't, or a package is not installed (exit 3).
    """
    optim, launch = asked(train), setup.launch
    problems = missing_packages(optim, speed)
    cpu, offload = setup.hardware.device == "cpu", speed.offload
    if offload not in ("auto", "none") and cpu:
        problems.append(
            Problem(
                "offloading needs a GPU, and this machine has none",
                "speed.offload",
                found=offload,
                fix="speed.offload: none",
                code="hardware",
            )
        )
    elif offload in ("optimizer", "all"):
        fix = f"speed.offload: {'activations' if offload == 'all' else 'none'}"
        if launch.processes > 1:
            problems.append(
                Problem(
                    "torchao's offloaded optimizer works only in one process",
                    "speed.offload",
                    found=f"{offload}, in a launch of {launch.processes} processes",
                    fix=fix,
                    code="speed-option",
                )
            )
        if launch.precision == "fp16":
            problems.append(
                Problem(
                    "the loss scaler of fp16 does not see gradients in CPU memory",
                    "speed.offload",
                    found=offload,
                    fix=fix,
                    code="speed-option",
                )
            )
    split = launch.splitter == "FSDP" and not _OF_TORCHAO.fullmatch(optim)
    if split and _OF_BITSANDBYTES.search(optim):  # under ZeRO it gets plain tensors
        low = "adamw_torch_8bit" if LOW_BITS.search(optim) else train_rules.DEFAULT
        problems.append(
            Problem(
                f"{optim} does not work with FSDP",
                "train.optim",
                found=optim,
                why="bitsandbytes' kernels need whole tensors",
                fix=f"set `train.optim: {low}`, or use accelerate_configs/ddp_8.yaml",
                code="launch-config",
            )
        )
    if "paged" in optim and cpu:
        problems.append(
            Problem(
                "a paged optimizer needs a GPU",
                "train.optim",
                found=optim,
                fix=f"train.optim: {optim.replace('paged_', '')}",
                code="hardware",
            )
        )
    raise_if_any(problems, code=Exit.ENVIRONMENT)


def known_bytes(optim: str) -> float | None:
    """Return bytes of optimizer state per trainable parameter; `None` if the optimizer is not known."""
    return next((size for pattern, size in _STATE if re.fullmatch(pattern, optim)), None)


def state_bytes(optim: str, speed: Speed) -> float:
    """Return bytes of optimizer state per trainable parameter on the device.

    An unknown optimizer counts as AdamW with two moments. An offloaded optimizer has 0 bytes.
    """
    if speed.offload in ("optimizer", "all"):
        return 0.0
    known = known_bytes(optim)
    return 8.0 if known is None else known
