"""Two ranks of one launch, forked from one process that has imported the libraries once.

Launchers themselves: test_train.py (`finetune train --accelerate`, `accelerate launch`) and test_evaluate.py.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def run(function: Callable[..., Any], *arguments: Any, **launch: str) -> None:
    """`function(*arguments)` as rank 0 and as rank 1, with the environment that `accelerate launch` gives.

    Call it in a process of its own. As under torchrun, the first rank that fails ends the other.

    Args:
        launch: what Accelerate's launcher sets; without, what it does for processes on CPUs.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the rank that failed.
    """
    from torch.multiprocessing import start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ |= launch or {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    start_processes(_rank, (function, arguments), nprocs=2, start_method="fork")


def _rank(rank: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    function(*arguments)
