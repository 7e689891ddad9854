"""Short runs for tests of faults, and their weights."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

FEW = ["train.max_steps=4", "adapter.lora_dropout=0.1", "train.effective_batch_size=8"]
FEW += ["data.validation=null"]  # the tests ask how they train


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
