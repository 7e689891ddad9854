"""Choose the machine that a plan is for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from finetune.autoconfig import memory_estimate
from finetune.core.errors import Problem, UserError
from finetune.hardware import detection, gpus
from finetune.hardware.detection import Hardware
from finetune.launch import accelerate_config, launcher
from finetune.planning import sharding_cost
from finetune.planning.sharding_cost import Sharding


class PlanRequest(NamedTuple):
    """The arguments of `finetune plan` apart from the recipe."""

    gpu: str | None
    gpus: int | None
    price: float | None
    """The price of one GPU for one hour, in any currency."""
    config: str | None
    """An accelerate config, by name or file. It sets the number of processes if `gpus` is not given."""


def find(name: str | None, count: int | None) -> tuple[Hardware, int]:
    """Return the machine to plan for and its number of processes.

    Args:
        name: a GPU of the table; `None`: this machine.
        count: the number of GPUs; `None`: one GPU of the table, or all GPUs of this machine.

    Raises:
        UserError: the table has no such GPU, or `count` is given on a machine without a GPU (exit 2).
    """
    if name is not None:
        gpu, cores = gpus.named(name), os.cpu_count() or 1
        found = Hardware(
            "cuda",
            f"NVIDIA {' '.join(gpu.device)}",
            count or 1,
            gpu.capability,
            gpu.memory_gib,
            cores,
            here=False,
        )
        return found, found.count
    here = detection.detect()
    if here.device == "cpu":
        if count is not None:
            raise UserError(
                Problem(
                    "this machine has no GPU, so the plan needs --gpu",
                    "--gpus",
                    found=str(count),
                    fix=f"--gpu {next(iter(gpus.GPUS))} --gpus {count}",
                    code="hardware",
                )
            )
        return here, 1
    from finetune.checkpointing import training_state  # imports torch, as `detect` did

    room = training_state.available() / 2 / memory_estimate.GIB  # a run uses half of the free CPU memory
    return replace(here, host_gib=room), count or int(os.environ.get("WORLD_SIZE", here.count))


def on_gpus(config: Path) -> None:
    """Refuse a config for the CPU if the plan is for a GPU (exit 2)."""
    if accelerate_config.read(config).get("use_cpu") is True:
        raise UserError(
            Problem(
                "the config is for the CPU, and --gpu plans for a GPU",
                "--accelerate",
                where=str(config),
                found="use_cpu: true",
                fix="--accelerate ddp_8, or omit --gpu",
                code="launch-config",
            )
        )


def of_arguments(requested: PlanRequest) -> tuple[Hardware, int, Sharding | None]:
    """Return the machine to plan for, its number of processes, and how their launch divides the training.

    Raises:
        UserError: the command line contradicts itself, or this machine (exit 2 or 3).
    """
    config = launcher.find(requested.config) if requested.config else None
    if config and requested.gpu:
        on_gpus(config)
    elif config:  # a plan for this machine
        launcher.check(config)
    by, count = sharding_cost.of_config(config, requested.gpus) if config else (None, requested.gpus)
    if config and not requested.gpus and not requested.gpu and detection.detect().device == "cpu":
        machine, processes = find(None, None)[0], count or 1
        machine = replace(machine, memory_gib=machine.memory_gib / processes)  # of one process
    else:
        machine, processes = find(requested.gpu, count)
    return machine, processes, by
