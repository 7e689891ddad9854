"""Evaluate what a run saved, once it is verified."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel

from finetune.core.command_lines import command
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives
from finetune.evaluation import evaluator, gpu_room
from finetune.run_folder.run_folder import RunFolder
from finetune.training import verify_saved
from finetune.training.eval_callback import Validate
from finetune.training.run_context import RunContext

# Variables that a launcher sets for its processes, and that a process outside of the launch must not see
_LAUNCHERS = re.compile(
    "(ACCELERATE|FSDP|PARALLELISM|TORCHELASTIC|TORCH_NCCL|LOCAL|GROUP|ROLE|MASTER)_.*|RANK|WORLD_SIZE"
)


def evaluate_in_new_process(folder: RunFolder, live: verify_saved.Live, checks: RunChecks) -> dict[str, Any]:
    """Evaluate the saved weights in another process, and return the content of eval.json.

    The saved weights are verified from the file alone.

    Raises:
        UserError: the file differs from the trained weights or can't be loaded, and is moved aside (exit 4);
            or the evaluation failed.
    """
    if collectives.main():
        verify_saved.add_saved_checks(live, folder, checks)
        verify_saved.check(folder, checks)
        line = [sys.executable, "-m", "finetune", "evaluate", str(folder.path), "--quiet"]
        done = subprocess.run(line, env=alone(), capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())[-500:]
            problem = Problem(
                "the evaluation failed after training",
                found=said,
                why="the trained weights are saved",
                fix=command("evaluate", str(folder.path)),
                code="run-check",
            )
            if done.returncode == Exit.ARTIFACT:
                problem = Problem(
                    "the saved weights can't be loaded",
                    where=str(folder.weights),
                    found=said,
                    fix="resume with --resume, or train again",
                    code="run-damaged",
                )
                verify_saved.set_aside(folder)
            raise UserError(problem, code=Exit.of(done.returncode))
    collectives.wait()
    collectives.appears(folder.path / "eval.json")
    return folder.read("eval.json")


def alone() -> dict[str, str]:
    """Return the environment for a process outside of this launch."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}


def evaluate_here(live: verify_saved.Live, folder: RunFolder, checks: RunChecks) -> dict[str, Any]:
    """Evaluate the saved weights, and return the content of eval.json.

    Weights that can't be loaded or verified are moved aside. Other errors, such as wrong options of the
    evaluation, do not concern the weights.
    """
    opened = False

    def same_as_live(reopened: PreTrainedModel) -> None:
        nonlocal opened
        opened = True
        verify_saved.check_reopened(live, reopened, folder, checks)

    try:
        return evaluator.run(folder.path, verify_reopened=same_as_live)
    except UserError as error:
        if error.code == Exit.ARTIFACT and not opened:
            verify_saved.set_aside(folder)
        raise


def reopen_and_evaluate(
    run: RunContext, live: verify_saved.Live, validations: Sequence[Validate]
) -> dict[str, Any]:
    """Verify that the saved weights are the best trained weights, evaluate them, and return the results."""
    torch.compiler.reset()  # CUDA graphs hold the weights that they read
    clear_device_cache(garbage_collection=True)  # of what was trained, which is read back
    model, setup = run.recipe.model, run.setup
    if setup.launch.processes > 1 and collectives.from_main(lambda: gpu_room.too_large(model, setup)):
        return evaluate_in_new_process(run.folder, live, run.checks)
    result = evaluate_here(live, run.folder, run.checks)
    for validation in validations:
        validation.add_run_check(result["tuned"]["loss"], run.checks)
    verify_saved.check(run.folder, run.checks)
    return result
