"""Small models whose base is in fp8."""

from __future__ import annotations

from pathlib import Path

import torch

from finetune.autoconfig.launch_settings import Launch
from finetune.autoconfig.machine_setup import Setup
from finetune.core.run_checks import Choice
from finetune.hardware.detection import Hardware
from finetune.models import loading
from finetune.recipe import loader
from support.paths import MODEL

IDS = torch.arange(8, 40).reshape(2, 16)
CPU = Hardware("cpu", "CPU", 1, (0, 0), 24, 2)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.norm(got.double() - wanted.double()) / torch.linalg.norm(wanted.double()))


def load(name: str | Path = MODEL, dtype: torch.dtype = torch.float32):
    """A base in fp8, as `finetune` loads it, on this machine without fp8 GEMMs."""
    precision = {torch.float32: "no", torch.bfloat16: "bf16"}[dtype]
    launch = Launch("none", 1, 0, precision, "hardware", "")
    setup = Setup(CPU, launch, Choice("sdpa", ""), Choice("fp8", ""))
    return loading.load(loader.load("recipes/quickstart.yaml", [f"model.name={name}"]).model, setup, "cpu")
