"""What a launch of several processes does with an odd number of examples is in the run's summary."""

from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from finetune.autoconfig.batch_size import Batch, count_steps
from finetune.recipe import build
from finetune.training import launch_checks


def notes(rows: int | None, batch: Batch, shards: int, **train: Any) -> list[str]:
    section: Any = build.sections("lora")["train"](effective_batch_size=batch.effective, **train)
    steps = count_steps(section, rows, batch, shards)
    return launch_checks.notes_on_repeats(section, rows, batch, shards, steps)


@pytest.mark.parametrize(("rows", "twice", "skipped"), [(97, 1, 1), (7, 1, 1), (98, 0, 0)])
def test_notes_on_repeats_two_processes_count_the_examples_trained_twice(
    rows: int, twice: int, skipped: int
) -> None:
    said = notes(rows, Batch(2, 1, 1), 2, num_train_epochs=1)
    given = [index for rank in range(2) for batch in sharded(rows, 1, 2, rank) for index in batch]
    assert len(given) - len(set(given)) == twice
    if not twice:
        assert said == []
        return
    assert f"each epoch trains {twice} of {rows} sequences twice" in said[0]
    assert f"dataloader_drop_last: true skips {skipped} sequences" in said[0]
    dropped = [index for rank in range(2) for batch in sharded(rows, 1, 2, rank, True) for index in batch]
    assert rows - len(set(dropped)) == skipped


def sharded(rows: int, size: int, shards: int, rank: int, drop_last: bool = False) -> list[list[int]]:
    """The batches of one process, as Accelerate gives them."""
    sampler = BatchSampler(range(rows), size, drop_last)
    made: Any = BatchSamplerShard(sampler, shards, rank)
    return list(made)


def test_notes_on_repeats_micro_batches_of_four_on_two_processes_fill_up_the_last() -> None:
    (said,) = notes(101, Batch(16, 4, 2), 2, num_train_epochs=2)
    assert "each epoch trains 3 of 101 sequences twice" in said
    assert "dataloader_drop_last: true skips 5 sequences" in said


def test_notes_on_repeats_nothing_to_say_is_not_said() -> None:
    assert notes(97, Batch(2, 1, 1), 1, num_train_epochs=1) == []  # one process
    assert notes(97, Batch(2, 1, 1), 2, max_steps=48) == []  # ends before the first epoch does
    assert len(notes(97, Batch(2, 1, 1), 2, max_steps=49)) == 1
    assert notes(97, Batch(2, 1, 1), 2, num_train_epochs=1, dataloader_drop_last=True) == []
    assert notes(None, Batch(2, 1, 1), 2, max_steps=500) == []  # streamed
