"""Decide whether a base model needs all GPUs of a machine."""

from __future__ import annotations

from finetune.autoconfig import memory_estimate
from finetune.autoconfig.machine_setup import Setup
from finetune.models import architecture
from finetune.recipe.schema import Model


def too_large(section: Model, setup: Setup) -> bool:
    """Return whether no single GPU can hold the base model and this machine has several."""
    machine = setup.hardware
    if machine.device == "cpu" or machine.count < 2:
        return False
    base = architecture.weights(architecture.read(section), setup.storage.value, setup.launch.precision)
    return base / memory_estimate.GIB > 0.85 * machine.memory_gib
