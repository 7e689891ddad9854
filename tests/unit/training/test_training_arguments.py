"""SFTConfig as the pipeline builds it."""

from __future__ import annotations

import pytest

from finetune.autoconfig import launch_settings, machine_setup
from finetune.autoconfig.batch_size import split_batch
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.recipe import loader
from finetune.training import training_arguments
from support.paths import QUICKSTART

CPU = Hardware("cpu", "CPU", 1, (0, 0), 16.0, 8)


@pytest.mark.parametrize(
    ("attention", "given", "multiple"),
    [
        ("cudnn", [], 64),
        ("cudnn", ["train.pad_to_multiple_of=8"], 8),
        ("varlen", [], None),
        ("sdpa", [], None),
    ],
)
def test_pad_to_multiple_of_follows_the_attention_kernel(
    attention: str, given: list[str], multiple: int | None
) -> None:
    recipe = loader.load(QUICKSTART, given)
    setup = machine_setup.Setup(CPU, launch_settings.read(CPU), Choice(attention, ""), Choice("", ""))
    batch = split_batch(recipe.train, 1)
    made = training_arguments.training_arguments(recipe.train, recipe.data, setup, batch)
    assert made.pad_to_multiple_of == multiple
