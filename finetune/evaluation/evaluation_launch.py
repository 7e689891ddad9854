"""Choose the launch of an evaluation on a machine with several GPUs."""

from __future__ import annotations

from finetune.evaluation import gpu_room, reopen
from finetune.hardware.detection import Hardware
from finetune.launch.launcher import LaunchChoice
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder


def launch_of(run: RunFolder, overrides: list[str], machine: Hardware) -> LaunchChoice:
    """Return the shipped config that distributes the examples over all GPUs.

    There is no config if one process needs all GPUs for the model.
    """
    recipe = run_folder.recipe_of(run, overrides)
    if gpu_room.too_large(recipe.model, reopen.setup_of(recipe)):
        return LaunchChoice(
            "", f"the base model does not fit on one GPU, so one process uses all {machine.count} GPUs", 1
        )
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        return LaunchChoice("", "vLLM runs in one process", 1)
    return LaunchChoice(
        "ddp_8",
        f"each of {machine.count} GPUs has the whole base model and a part of the examples",
        machine.count,
    )
