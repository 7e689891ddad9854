"""Check that checkpoints fit on the disk and in memory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from finetune.adapters import trainable_parameters
from finetune.autoconfig import optimizer_choice
from finetune.autoconfig.launch_settings import Launch
from finetune.checkpointing import checkpoints, training_state
from finetune.distributed import collectives, sharded_tensors
from finetune.recipe.schema import Recipe


def check_space(
    adapted: nn.Module,
    recipe: Recipe,
    launch: Launch,
    place: Path,
    groups: Path = training_state.GROUPS,
) -> None:
    """Check on rank 0 that the checkpoints fit on its disk, and a gathered checkpoint in its memory.

    Args:
        place: the folder of the checkpoints.
        groups: the folder with the memory limits of this process's container.
    """
    section, evaluated = recipe.train, recipe.eval  # a checkpoint may also hold the best weights so far
    if section.save_strategy == "no" or optimizer_choice.unsaved(section, launch.keeper):
        return
    weights = trainable_parameters.trainable(adapted).values()
    sizes = [(sharded_tensors.shape(p).numel(), p.element_size()) for p in weights]
    trained, numbers = sum(count * size for count, size in sizes), sum(count for count, _ in sizes)
    masters = 4 if launch.splitter == "DeepSpeed" else 0  # ZeRO's fp32 weights, in addition to the moments
    low = optimizer_choice.state_bytes(optimizer_choice.asked(section), recipe.speed)
    optimizer_bytes = round(numbers * ((low or 8) + masters))
    checkpoint_bytes = optimizer_bytes + trained * (
        2 if evaluated.eval_steps and evaluated.load_best_model_at_end else 1
    )
    collectives.from_main(
        lambda: checkpoints.check_space(place, trained, checkpoint_bytes, section.save_total_limit)
    )
    if launch.splitter:  # under ZeRO in addition to a copy of each process's shard
        total_bytes = checkpoint_bytes + (optimizer_bytes if masters else 0)
        collectives.from_main(
            lambda: training_state.check_memory(total_bytes, training_state.available(groups))
        )
