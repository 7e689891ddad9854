"""FSDP2 on ranks without GPUs: Accelerate shards for GPUs alone, so the ranks say that they have some."""

from __future__ import annotations

import sys
from typing import Any

from finetune.cli import main

ENVIRONMENT = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


def imitate() -> None:
    """In a process that ends with its run: Accelerate and finetune take the CPU ranks for GPUs."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    from finetune.preflight import launch_conflicts

    begin = PartialState.__init__

    def as_on_gpus(self: Any, *args: Any, **given: Any) -> None:
        begin(self, *args, **given)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = as_on_gpus
    launch_conflicts._sharding = lambda *given: []  # it refuses what Accelerate would not split


def command(words: list[str]) -> None:
    """`finetune WORDS` in such a process."""
    imitate()
    if code := main.main(words):
        sys.exit(code)
