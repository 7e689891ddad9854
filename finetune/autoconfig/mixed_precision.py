"""Choose the compute dtype from the launch and the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.kernels import kernel_limits

if TYPE_CHECKING:
    from finetune.hardware.detection import Hardware

STORED = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of weights, by storage
# Of computation, by precision; of what is not in fp8
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


@dataclass(frozen=True)
class Launch:
    """What the launcher decided, and what was decided in its absence."""

    launcher: str  # accelerate | torchrun | none
    processes: int
    rank: int
    precision: str  # of the Accelerator: no | bf16 | fp16 | fp8
    precision_by: str  # launch | hardware
    precision_reason: str
    sharded: str = ""  # what splits weights between processes: FSDP, DeepSpeed
    fp8: str = ""  # what an fp8 launch means: launch_env.FROZEN, TE, AO
    splitter: str = ""  # what splits the optimizer's state, the weights or not: FSDP, DeepSpeed

    @property
    def keeper(self) -> str:
        """What holds state that checkpoints need, and may not give it: a splitter; TransformerEngine's layers
        the largest values that they remember; DeepSpeed its own scale of a loss in fp16, and files of its own
        on a disk that it offloads to."""
        if self.fp8 == "TE":
            return "TransformerEngine"
        if self.splitter == "DeepSpeed" and self.precision == "fp16":
            return "DeepSpeed in fp16"
        if self.splitter == "DeepSpeed" and launch_environment.offloads_to("nvme"):
            return "DeepSpeed on NVMe"
        return self.splitter

    @property
    def sharing(self) -> int:
        """Processes that share each row: a context-parallel group."""
        return launch_environment.parallel("CP")

    @property
    def rows_apart(self) -> int:
        """Processes with rows of their own."""
        return self.processes // self.sharing

    @property
    def main(self) -> bool:
        return self.rank == 0


def compute_dtype(precision: str, storage: str) -> str:
    """The dtype of matrix products, by the launch's precision and the weights' storage."""
    return STORED[storage] if precision == "no" and storage in STORED else DTYPES[precision]


def launch(hardware: Hardware) -> Launch:
    """How this process was started: `accelerate launch` owns precision, else the hardware decides.

    Raises:
        UserError: bf16 under a GPU that lacks it, fp16 on the CPU, fp8 where there are no fp8 GEMMs (exit 3).
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION")
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = "accelerate" if asked else "torchrun" if torchrun else "none"
    precision, reason = (asked, "its mixed_precision") if asked else default_precision(hardware)
    processes, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    fp8 = launch_environment.fp8()
    if fp8.kind:
        precision, reason = fp8.precision, fp8.reason
        if missing := fp8_missing(hardware, "bf16"):  # Accelerate would take fp16, with a warning in its log
            what, fix = "an fp8 launch needs fp8 GEMMs", "mixed_precision: bf16 in the accelerate config"
            raise UserError(Problem(what, found=missing, fix=fix), code=Exit.ENVIRONMENT)
    check_precision(precision, hardware)
    by = "launch" if asked else "hardware"
    split = launch_environment.sharded(), fp8.kind, launch_environment.splitter()
    return Launch(launcher, processes, rank, precision, by, reason, *split)


def check_precision(precision: str, machine: Hardware) -> None:
    """Refuse what the machine does not compute in, or not with what training in it needs (exit 3)."""
    if precision == "bf16" and machine.device == "cuda" and machine.capability < (8, 0):
        found = f"{machine.name}, compute capability {machine.capability[0]}.{machine.capability[1]}"
        fix = "mixed_precision: fp16 in the accelerate config"
        raise UserError(Problem("this GPU has no bf16", found=found, fix=fix), code=Exit.ENVIRONMENT)
    if precision == "fp16" and machine.device == "cpu":
        what = "fp16 can't be trained in on the CPU: Accelerate has neither autocast nor a loss scaler for it"
        fix = 'mixed_precision: "no" or bf16 in the accelerate config'
        raise UserError(Problem(what, found="mixed_precision: fp16", fix=fix), code=Exit.ENVIRONMENT)


def default_precision(hardware: Hardware) -> Choice:
    if hardware.device == "cpu":
        return Choice("no", "no GPU: fp32 on the CPU")
    if hardware.capability >= (8, 0):
        return Choice("bf16", f"{hardware.name} has bf16")
    return Choice(
        "fp16",
        f"{hardware.name} has no bf16 (compute capability below 8.0): fp16 with a loss scaler",
    )


def fp8_missing(machine: Hardware, precision: str) -> str:
    """Why products on an fp8 base can't run as fp8 GEMMs here; the empty string if they can."""
    if machine.device != "cuda" or machine.capability < kernel_limits.FP8_CAPABILITY:
        return f"{machine.name} has no fp8 GEMMs (compute capability 8.9 has: Ada, Hopper or newer)"
    return "" if precision == "bf16" else f"fp8 GEMMs give bf16, and the launch's precision is {precision}"


def check_tf32(asked: bool | None, hardware: Hardware) -> None:
    """Refuse `train.tf32` on a device that has no such mode.

    Raises:
        UserError: exit 3.
    """
    if asked and hardware.capability < (8, 0):
        what = "TF32 needs a GPU of compute capability 8.0 or more"
        problem = Problem(what, "train.tf32", found=hardware.name, fix="drop it")
        raise UserError(problem, code=Exit.ENVIRONMENT)
