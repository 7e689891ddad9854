"""The plan of a run: what it chooses, needs and takes."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.autoconfig.batch_size import Batch
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.planning import memory_by_phase
from finetune.planning.sharding_cost import Sharding

COMPILE_SECONDS = 25  # compilation in the first step (benchmarks/gpu.json)


@dataclass(frozen=True)
class Plan:
    """The memory, time and choices of a recipe on a machine."""

    machine: Hardware
    processes: int
    choices: dict[str, Choice]
    batch: Batch
    tokens: int
    """The largest number of tokens in one forward pass, for which memory is planned."""
    steps: int | None
    phases: dict[str, dict[str, float]]
    """GiB by phase and kind."""
    usable: float
    """GiB of a device that a run may use."""
    parts: dict[str, float]
    """Seconds of a step by kind of work; empty: not known."""
    row_tokens: float
    """Mean tokens of a row; `data.max_length` if the data is not known."""
    trained: int
    source: str
    notes: tuple[str, ...]
    by: Sharding
    """How the launch divides the training."""
    refused: str = ""
    """Why a run would refuse the data."""
    sent: tuple[float, float] = (0.0, 0.0)
    """Bytes that a GPU sends in a step, and its bandwidth in bytes/s; 0: not known."""
    kept_free: float = 0.0
    """GiB that a step must leave free for NCCL, compiled code and fragmentation, if weights are sharded."""

    @property
    def peak(self) -> float:
        """GiB of the largest phase of training."""
        return max(sum(self.phases[name].values()) for name in ("load", "step", "save"))

    @property
    def needed(self) -> float:
        """GiB that must be usable: the peak, or the step plus the memory that it must leave free."""
        return max(self.peak, sum(self.phases["step"].values()) + self.kept_free)

    @property
    def host(self) -> float:
        """GiB of CPU memory that one process fills by offloading."""
        return sum(self.phases.get(memory_by_phase.HOST, {}).values())

    @property
    def fits(self) -> bool:
        room = self.machine.host_gib
        return self.needed <= self.usable and (room is None or self.host * self.processes <= room)

    @property
    def step_seconds(self) -> float | None:
        return sum(self.parts.values()) if self.parts else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s over all processes, without padding."""
        return self.step_tokens / self.step_seconds if self.step_seconds else None

    @property
    def step_tokens(self) -> float:
        return self.batch.effective * self.row_tokens

    @property
    def seconds(self) -> float | None:
        """Seconds of training, including compilation; `None`: not known."""
        if not self.step_seconds or self.steps is None:
            return None
        return self.steps * self.step_seconds + COMPILE_SECONDS * (self.choices["compile"].value == "on")
