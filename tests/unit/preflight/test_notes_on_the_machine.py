"""`check` notes what `train` refuses on this machine of `train:`, with the words of `train`."""

from __future__ import annotations

import pytest
import torch

from finetune.core.errors import UserError
from finetune.preflight import checker, choice_checks
from finetune.recipe import loader
from support.paths import QUICKSTART

ON_CPU = [["train.tf32=true"]] * (not torch.cuda.is_available())
WITHOUT_WORKERS = [
    ["train.dataloader_num_workers=0", "train.dataloader_prefetch_factor=2"],
    ["train.dataloader_num_workers=0", "train.dataloader_persistent_workers=true"],
]


@pytest.mark.parametrize("overrides", [*ON_CPU, *WITHOUT_WORKERS], ids=lambda overrides: overrides[-1])
def test_setting_that_this_machine_lacks_is_a_note_of_check(overrides: list[str], tmp_path) -> None:
    recipe = loader.load(QUICKSTART, [*overrides, f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError) as refused:
        choice_checks.setup_of(recipe)
    (note,) = [note for note in checker.check(recipe) if note.startswith("train would stop")]
    key = overrides[-1].partition("=")[0]
    assert key in note and refused.value.problems[0].what in note


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.tf32=false"],
        ["train.dataloader_num_workers=1", "train.dataloader_prefetch_factor=2"],
        ["train.dataloader_num_workers=1", "train.dataloader_persistent_workers=true"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_setting_that_this_machine_has_is_no_note(overrides: list[str], tmp_path) -> None:
    recipe = loader.load(QUICKSTART, [*overrides, f"train.output_dir={tmp_path / 'run'}"])
    choice_checks.setup_of(recipe)
    assert not [note for note in checker.check(recipe) if note.startswith("train would stop")]
