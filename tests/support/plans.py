"""Plans for GPUs that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.planning import plan, planned_machine, planner
from finetune.recipe import loader

if TYPE_CHECKING:
    from pathlib import Path

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip


def planned(path: Path, *overrides: str, gpu: str = "h200", count: int | None = None) -> plan.Plan:
    """The plan of a recipe for GPUs of the table."""
    return planner.make(loader.load(path, overrides), *planned_machine.find(gpu, count))
