"""Choose the compute dtype of a launch on a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.kernels import kernel_limits

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from finetune.hardware.detection import Hardware

# The dtype of weights by storage.
STORED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The dtype of computation by precision. Under fp8, it is the dtype of all tensors that are not in fp8.
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Autocast as Accelerate applies it under this precision."""
    import torch

    return torch.autocast(device, getattr(torch, DTYPES[precision]), enabled=precision != "no")


def compute_dtype(precision: str, storage: str) -> str:
    """Return the dtype of GEMMs from the launch's precision and the storage of the weights."""
    return STORED[storage] if precision == "no" and storage in STORED else DTYPES[precision]


def check_precision(precision: str, machine: Hardware) -> None:
    """Refuse a precision in which the machine can't train (exit 3)."""
    if precision == "bf16" and machine.device == "cuda" and machine.capability < (8, 0):
        raise UserError(
            Problem(
                "this GPU does not support bf16",
                found=f"{machine.name}, compute capability {machine.capability[0]}.{machine.capability[1]}",
                expected="compute capability 8.0 or more",
                fix="set `mixed_precision: fp16` in the accelerate config",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )
    if precision == "fp16" and machine.device == "cpu":
        raise UserError(
            Problem(
                "the CPU can't train in fp16",
                found="mixed_precision: fp16",
                why="Accelerate has no fp16 autocast or loss scaler for CPUs",
                fix='set `mixed_precision: "no"` or bf16 in the accelerate config',
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )


def default_precision(hardware: Hardware) -> Choice:
    if hardware.device == "cpu":
        return Choice("no", "no GPU")
    if hardware.capability >= (8, 0):
        return Choice("bf16", f"{hardware.name} supports bf16")
    return Choice(
        "fp16",
        f"fp16 with a loss scaler, because {hardware.name} has no bf16 (compute capability below 8.0)",
    )


def fp8_missing(machine: Hardware, precision: str) -> str:
    """Return why an fp8 base model can't use fp8 GEMMs on this machine; the empty string if it can."""
    if machine.device != "cuda" or machine.capability < kernel_limits.FP8_CAPABILITY:
        return f"{machine.name} has no fp8 GEMMs, which need compute capability 8.9 (Ada, Hopper or newer)"
    return "" if precision == "bf16" else f"fp8 GEMMs return bf16, and the launch's precision is {precision}"


def check_tf32(requested: bool | None, hardware: Hardware) -> None:
    """Refuse `train.tf32` on a device that has no such mode.

    Raises:
        UserError: exit 3.
    """
    if requested and hardware.capability < (8, 0):
        raise UserError(
            Problem(
                "TF32 needs a GPU of compute capability 8.0 or more",
                "train.tf32",
                found=hardware.name,
                fix="remove `train.tf32`",
                code="hardware",
            ),
            code=Exit.ENVIRONMENT,
        )
