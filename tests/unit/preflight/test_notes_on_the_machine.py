"""`check` notes what `train` refuses on this machine of `train:`, with the words of `train`."""

from __future__ import annotations

import pytest
import torch

from finetune.core import packages
from finetune.core.errors import Exit, UserError
from finetune.distributed import collectives
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


@pytest.mark.parametrize(
    "left",
    [
        {"LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        {"PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_variables_of_a_launcher_without_a_launcher(left: dict, device: str, monkeypatch, tmp_path) -> None:
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        collectives.start(device)
    problem = refused.value.problems[0]
    assert refused.value.code == Exit.ENVIRONMENT and all(name in problem.fix for name in left)
    recipe = loader.load(QUICKSTART, [f"train.output_dir={tmp_path / 'run'}"])
    assert any(problem.what in note for note in checker.check(recipe))


@pytest.mark.skipif(packages.installed("deepspeed"), reason="DeepSpeed is installed")
def test_deepspeed_that_is_not_installed(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    recipe = loader.load(QUICKSTART, [f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="DeepSpeed, which is not installed"):
        choice_checks.setup_of(recipe)
