"""Choose the data loader's workers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune.hardware.detection import Hardware

# Settings of workers; a start method without a worker has no effect, and torch takes it
OF_WORKERS = ("dataloader_persistent_workers", "dataloader_prefetch_factor")


def loader(
    hardware: Hardware, processes: int, given: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """SFTConfig's loader settings: workers that are ahead of each GPU, none where the CPU itself trains.

    Args:
        processes: of this machine.
        given: `train:`, where it says so itself.

    Raises:
        UserError: a setting of workers, and there are none (exit 2).
    """
    own = 0 if hardware.device == "cpu" else max(1, min(2, hardware.cpu_cores // processes - 1))
    asked = given.get("dataloader_num_workers")
    workers = own if asked is None else asked
    for name in OF_WORKERS:  # torch says so once the model has loaded
        if given.get(name) and not workers:
            what, fix = "there are no data loader workers here", "dataloader_num_workers: 2"
            raise UserError(Problem(what, f"train.{name}", found=str(given[name]).lower(), fix=fix))
    if hardware.device == "cpu":
        return {"dataloader_num_workers": 0, "dataloader_pin_memory": False}
    # Of these upstream refuses the first, and torch the second, where there are none
    busy = {"dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True} if workers else {}
    return {
        "dataloader_num_workers": workers,
        **busy,
        "dataloader_pin_memory": True,
        "accelerator_config": {"non_blocking": True},
    }
