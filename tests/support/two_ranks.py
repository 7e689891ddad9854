"""Two ranks of one launch, forked from a server that has imported the libraries once for a worker's tests.

Launchers themselves: test_ranks.py, test_train.py, test_two_hosts.py and test_evaluate.py.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main
from support.runs import metrics, run_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune.run_folder.run_folder import RunFolder

SECONDS = 300.0
GRACE = 5.0  # seconds for the other rank, once one has failed
STACKS = SECONDS - GRACE  # a rank that still runs after this time prints where


def run(
    function: Callable[..., Any],
    *arguments: Any,
    cwd: Path | None = None,
    count: int = 2,
    preloaded: tuple[str, ...] = (
        "finetune.experiments.runner.preload_libraries",
    ),  # as `worker_process.WARM` has it
    **launch: str,
) -> str:
    """`function(*arguments)` as rank 0 and as rank 1, with the environment that `accelerate launch` gives.

    As under torchrun, the first rank that fails ends the other.

    Args:
        function: of a module that can be imported.
        count: 1: as one process alone, without a launch.
        preloaded: modules that the server has imported.
        launch: what Accelerate's launcher sets; without, what it does for processes on CPUs.

    Returns:
        What both said.

    Raises:
        AssertionError: a rank failed, or did not end; with what both said, and where each of them waited.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if count > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= launch or {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(count)]
        given = (str(cwd or Path.cwd()), dict(environment), pickle.dumps((function, arguments)))
        ranks = [
            context.Process(target=_rank, args=(rank, str(log), *given)) for rank, log in enumerate(logs)
        ]
        for process in ranks:
            process.start()
        until = time.monotonic() + SECONDS
        while running := [process for process in ranks if process.exitcode is None]:
            wait([process.sentinel for process in running], max(0.0, until - time.monotonic()))
            failed = any(process.exitcode for process in ranks)
            if time.monotonic() >= until:
                for process in running:
                    process.kill()
            elif failed and until - time.monotonic() > GRACE:
                until = time.monotonic() + GRACE
        said = "".join(log.read_text() for log in logs if log.exists())
    codes = [process.exitcode for process in ranks]
    assert not any(codes), f"the ranks ended with {codes}\n{said}"
    return said


def free_port() -> int:
    """The port is outside of the kernel's automatic range, so no process takes it before rank 0 listens."""
    for port in range(10_000 + os.getpid() % 20_000, 32_768):
        with socket.socket() as free:
            if free.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("every port up to 32,767 is taken")


def command(words: list[str]) -> None:
    """`finetune WORDS`, forked. This is not in a test module. The import of a test module counts the GPUs,
    before this process knows its own GPUs."""
    if torch.cuda._is_in_bad_fork():  # an import has used a GPU, so import again in a new process
        os.execv(sys.executable, [sys.executable, "-m", "finetune", *words])
    if code := main.main(words):
        sys.exit(code)


def compare(one: RunFolder, two: RunFolder) -> None:
    """That two processes trained what one did: each step, the weights, the evaluation."""
    assert run_checks(two)["processes"]["actual"] == "2"
    assert two.read("environment.json")["launch"]["launcher"] == "accelerate"
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    alone, made = (load_file(next(run.weights.glob("*model.safetensors"))) for run in (one, two))
    assert alone.keys() == made.keys()
    for name, tensor in alone.items():
        assert torch.linalg.norm(tensor - made[name]) < 1e-3 * torch.linalg.norm(tensor), name
    evaluated = [run.read("eval.json")["tuned"]["loss"] for run in (one, two)]
    assert evaluated[1] == pytest.approx(evaluated[0], abs=1e-5)


def _rank(rank: int, log: str, cwd: str, environment: dict[str, str], pickled: bytes) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    faulthandler.enable(out)
    faulthandler.dump_traceback_later(STACKS, file=out)
    os.environ.clear()
    os.environ.update(environment)
    if "WORLD_SIZE" in environment:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(cwd)
    main.RANK_0_FIRST = 0  # no launcher ends rank 0 as soon as another has left: it has GRACE
    function, arguments = pickle.loads(pickled)  # here, so that the log holds an error of an import
    function(*arguments)
