"""Detect the GPUs of this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.hardware import gpus

if TYPE_CHECKING:
    import torch

OF_AMD = (8, 0)
DEVICE = "ACCELERATE_TORCH_DEVICE"


@dataclass(frozen=True)
class Hardware:
    """The devices of a machine."""

    device: str
    """cuda or cpu."""
    name: str
    count: int
    capability: tuple[int, int]
    """As `capability` returns it; (0, 0) on the CPU."""
    memory_gib: float
    """Memory of one device."""
    cpu_cores: int
    host_gib: float | None = None
    """CPU memory that GPUs may fill by offloading; `None`: not known."""
    here: bool = True
    """False: a plan for another machine, whose packages are not known."""

    @property
    def peak_flops(self) -> float | None:
        """Dense bf16 FLOP/s of one device; `None` if the table of GPUs lacks it."""
        known = gpus.of_device(self.name)
        return known.bf16 if known else None


def detect() -> Hardware:
    """Detect the devices of this machine. This imports torch.

    Raises:
        UserError: Accelerate's variable names another device (exit 3).
    """
    import psutil
    import torch

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if torch.cuda.is_available() and not launch_environment.on("ACCELERATE_USE_CPU"):  # set by the launch
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory / 2**30
        _check_variable("cuda", torch.cuda.device_count())
        return Hardware("cuda", properties.name, torch.cuda.device_count(), capability(0), memory, cores)
    _check_variable("cpu", 1)
    return Hardware("cpu", "CPU", 1, (0, 0), psutil.virtual_memory().total / 2**30, cores)


def capability(device: torch.device | int) -> tuple[int, int]:
    """Return the CUDA compute capability of a GPU, at most (8, 0) for a GPU of AMD.

    torch returns the version of an AMD GPU's architecture, such as (9, 4). The fp8 and Hopper kernels that
    finetune chooses by larger numbers are for NVIDIA GPUs.
    """
    import torch

    found = torch.cuda.get_device_capability(device)
    return min(found, OF_AMD) if torch.version.hip else found


def _check_variable(device: str, count: int) -> None:
    """Check that `ACCELERATE_TORCH_DEVICE`, which Accelerate follows, names a device that finetune uses."""
    known, given = [device, *(f"{device}:{index}" for index in range(count))], os.environ.get(DEVICE)
    if given not in (None, *known):
        raise UserError(
            Problem(
                "the device is not one that finetune uses here",
                found=f"{DEVICE}={given!r}"[:200],
                expected=" or ".join(known),
                fix=f"unset {DEVICE}",
                code="launch-config",
            ),
            code=Exit.ENVIRONMENT,
        )
