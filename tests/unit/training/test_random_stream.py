"""The data guide: finetune's loader leaves the global random stream alone, TRL's loader draws from it."""

from pathlib import Path

import torch
from trl.trainer.sft_trainer import SFTTrainer

from support.trainers import trainer_of


def test_get_train_dataloader_draws_nothing_from_the_global_stream(two_layers: Path, tmp_path: Path) -> None:
    trainer = trainer_of(two_layers, tmp_path, "trl")
    first_rows = []
    for get_loader, expected in ((trainer.get_train_dataloader, True), (None, False)):
        loader = get_loader() if get_loader else SFTTrainer.get_train_dataloader(trainer)
        before = torch.get_rng_state()
        first_rows.append(next(iter(loader))["input_ids"].tolist())
        assert torch.equal(before, torch.get_rng_state()) is expected
    assert first_rows[0] == first_rows[1], "the order of examples is the same"
