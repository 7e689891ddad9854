"""Shared by the tests on a GPU: plain runs to compare with, and its memory and cores among the workers."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import json
import os
from typing import TYPE_CHECKING

import pytest

from finetune.run_folder.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # Inductor would take all cores, in each worker
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, threads)))
HELD = 4 * 2**30  # bytes that torch may keep after a test for the next one, while other workers need some


@pytest.fixture(autouse=True)
def memory_for_others() -> Iterator[None]:
    import torch  # not above: this file is imported before the filters of warnings are set

    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > HELD:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def train_once(
    train: Callable[..., RunFolder], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., RunFolder]:
    """`train_once(*overrides)`: a run of `train` that is only read; all workers of a session make it once."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def run(*overrides: str) -> RunFolder:
        key = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:16]
        folder, done = shared / f"once-{key}", shared / f"once-{key}.done"
        if done.exists():  # a process that the training has left behind can hold the lock
            return RunFolder(folder)
        with folder.with_suffix(".lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not done.exists():
                train(*overrides, f"train.output_dir={folder}")
                done.touch()
        return RunFolder(folder)

    return run
