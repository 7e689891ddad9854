"""How this process was launched: its number of processes, its precision and what shards the model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from finetune.autoconfig import mixed_precision
from finetune.core.errors import Exit, Problem, UserError
from finetune.distributed import launch_environment
from finetune.hardware import detection
from finetune.hardware.detection import Hardware


@dataclass(frozen=True)
class Launch:
    """The settings of the launcher. Without a launcher, finetune decides them."""

    launcher: str
    """accelerate, torchrun or none."""
    processes: int
    rank: int
    precision: str
    """The Accelerator's mixed precision: no, bf16, fp16 or fp8."""
    precision_by: str
    """launch or hardware: who set the precision."""
    precision_reason: str
    sharded: str = ""
    """The library that shards the weights: FSDP or DeepSpeed."""
    fp8: str = ""
    """The kind of an fp8 launch: `launch_environment.FROZEN`, TE or AO."""
    splitter: str = ""
    """The library that shards the optimizer state, with or without the weights: FSDP or DeepSpeed."""

    @property
    def keeper(self) -> str:
        """The library that holds state which a checkpoint may be unable to save.

        FSDP and DeepSpeed shard state. TransformerEngine's layers keep a history of largest values. DeepSpeed
        in fp16 keeps its own loss scale. DeepSpeed on NVMe keeps its own files.
        """
        if self.fp8 == "TE":
            return "TransformerEngine"
        if self.splitter == "DeepSpeed" and self.precision == "fp16":
            return "DeepSpeed in fp16"
        if self.splitter == "DeepSpeed" and launch_environment.offloads_to("nvme"):
            return "DeepSpeed on NVMe"
        return self.splitter

    @property
    def sharing(self) -> int:
        """Processes that share each sequence: the size of a context-parallel group."""
        return launch_environment.parallel("CP")

    @property
    def data_parallel_size(self) -> int:
        """Groups of processes with sequences of their own."""
        return self.processes // self.sharing

    @property
    def main(self) -> bool:
        return self.rank == 0


def read(hardware: Hardware | None = None) -> Launch:
    """Read how this process was launched. `accelerate launch` sets the precision, else the hardware decides.

    Args:
        hardware: `None`: this machine's.

    Raises:
        UserError: the GPU has no bf16 or no fp8 GEMMs, or fp16 is asked for on the CPU (exit 3).
    """
    hardware = hardware or detection.detect()
    requested = os.environ.get("ACCELERATE_MIXED_PRECISION")
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    launcher = "accelerate" if requested else "torchrun" if torchrun else "none"
    precision, reason = mixed_precision.default_precision(hardware)
    if requested:
        precision, reason = requested, "its mixed_precision"
    processes, rank = launch_environment.processes(), int(os.environ.get("RANK", "0"))
    fp8 = launch_environment.fp8()
    if fp8.kind:
        precision, reason = fp8.precision, fp8.reason
        missing = mixed_precision.fp8_missing(hardware, "bf16")
        if missing:  # Accelerate would fall back to fp16 with a warning
            raise UserError(
                Problem(
                    "an fp8 launch needs a GPU with fp8 GEMMs",
                    found="mixed_precision: fp8",
                    why=missing,
                    fix="set `mixed_precision: bf16` in the accelerate config",
                    code="hardware",
                ),
                code=Exit.ENVIRONMENT,
            )
    mixed_precision.check_precision(precision, hardware)
    by = "launch" if requested else "hardware"
    split = launch_environment.sharded(), fp8.kind, launch_environment.splitter()
    return Launch(launcher, processes, rank, precision, by, reason, *split)
