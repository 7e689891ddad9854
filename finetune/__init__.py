"""Fine-tune LLaMA-style models from one recipe file, with proof of what ran.

import finetune
run = finetune.train.run(finetune.load_recipe("recipes/quickstart.yaml", ["adapter.type=ia3"]))
finetune.evaluate.run(run.path)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune import evaluate, train
    from finetune.recipe import load as load_recipe

__all__ = ["evaluate", "load_recipe", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import on first use: `import finetune` stays light."""
    if name in ("evaluate", "train"):
        return importlib.import_module(f"finetune.{name}")
    if name == "load_recipe":
        return importlib.import_module("finetune.recipe").load
    raise AttributeError(name)
