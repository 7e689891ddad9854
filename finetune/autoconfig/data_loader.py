"""Choose the data loader's workers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.hardware.detection import Hardware

# Settings that need workers. A start method without workers is no error: it has no effect.
OF_WORKERS = ("dataloader_persistent_workers", "dataloader_prefetch_factor")


def loader_of_launch(hardware: Hardware, train_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for the processes of this launch on this machine."""
    return loader(hardware, int(launch_environment.said("LOCAL_WORLD_SIZE", "1")), train_keys)


def loader(
    hardware: Hardware, processes: int, train_keys: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Return SFTConfig's data loader settings. Workers prepare batches for each GPU; a CPU run has none.

    Args:
        processes: the number of processes on this machine.
        train_keys: the settings of the recipe's `train:` section.

    Raises:
        UserError: a setting needs workers, but there are none (exit 2).
    """
    own = 0 if hardware.device == "cpu" else max(1, min(2, hardware.cpu_cores // processes - 1))
    requested = train_keys.get("dataloader_num_workers")
    workers = own if requested is None else requested
    for name in OF_WORKERS:  # torch raises this error only after the model is loaded
        if train_keys.get(name) and not workers:
            raise UserError(
                Problem(
                    f"{name} needs data loader workers",
                    f"train.{name}",
                    found=f"{str(train_keys[name]).lower()}, with 0 workers",
                    fix="train.dataloader_num_workers: 2",
                    code="recipe-conflict",
                )
            )
    if hardware.device == "cpu":
        return {"dataloader_num_workers": 0, "dataloader_pin_memory": False}
    # Without workers, transformers refuses the prefetch factor and torch refuses persistent workers.
    busy = {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True} if workers else {}
    return {
        "dataloader_num_workers": workers,
        **busy,
        "dataloader_pin_memory": True,
        "accelerator_config": {"non_blocking": True},
    }
