"""Check the start of a run before its model: its launch, folder, checkpoint, data and schedule."""

from __future__ import annotations

from typing import NamedTuple

from trl.trainer.sft_config import SFTConfig

from finetune.autoconfig import batch_size
from finetune.autoconfig.batch_size import Batch
from finetune.checkpointing import resume
from finetune.checkpointing.checkpoints import VerifiedCheckpoint
from finetune.data.preparation import Prepared
from finetune.evaluation import lm_eval_harness, tasks
from finetune.preflight import choice_checks, token_checks
from finetune.recipe.schema import Recipe, Train
from finetune.training import load_data, optimizers, resume_facts, stopping, training_arguments
from finetune.training.run_context import RunData


class PlannedStart(NamedTuple):
    """What a run would start with."""

    prepared: Prepared
    checkpoint: VerifiedCheckpoint | None
    """The checkpoint that it would resume."""
    unseen: list[str]
    """What only the processes of the launch can check."""


def check_start(recipe: Recipe, resumes: str | None, *, launches: bool) -> PlannedStart:
    """Prepare the data, and refuse what `train` refuses before it loads a weight (`pipeline._begin`).

    Args:
        resumes: the checkpoint to resume, as `--resume` has it.
        launches: the run starts processes of its own, whose state is another.

    Raises:
        UserError: a launch, a folder, a checkpoint, examples, or values of SFTConfig or of the schedule.
    """
    setup, checkpoint = choice_checks.setup_of(recipe), resume.find_in(recipe.train.output_dir, resumes)
    shards = setup.launch.data_parallel_size
    batch = batch_size.split_batch(recipe.train, shards)
    alone = setup.launch.processes == 1  # else SFTConfig would wait for processes that have ended
    sft_config = (
        training_arguments.training_arguments(recipe.train, recipe.data, setup, batch) if alone else None
    )
    check_evaluation(recipe)
    tokenizer, prepared = load_data.prepare_data(recipe)
    token_checks.check_texts(recipe, tokenizer)
    steps = count_steps(recipe.train, shards, batch, prepared, sft_config)
    if sft_config and not launches:
        stopping.check(recipe.train, resumes, setup.launch.keeper)
        data = RunData(tokenizer, prepared, sft_config)
        resume_facts.contract_of(recipe, setup, data, batch, steps, checkpoint)
    later = checkpoint and not (sft_config and not launches)
    unseen = ["SFTConfig", "the schedule"] * (not alone) + ["the checkpoint"] * bool(later)
    return PlannedStart(prepared, checkpoint, unseen)


def check_evaluation(recipe: Recipe) -> None:
    """Refuse tasks, texts and a metric which would end the run after its last step."""
    tasks.check_metric(recipe.eval, lm_eval_harness.check(recipe.eval, recipe.model))
    tasks.general_texts(recipe.eval)


def count_steps(
    train: Train, shards: int, batch: Batch, prepared: Prepared, arguments: SFTConfig | None
) -> int:
    """Count the optimizer steps of a run, and refuse a schedule that does not fit into them.

    Args:
        shards: processes with sequences of their own.
        arguments: `None`: this process can't build them, and the schedule is not checked.
    """
    steps = batch_size.count_steps(train, prepared.rows, batch, shards)
    if arguments:
        optimizers.check_schedule(arguments, steps)
    return steps
