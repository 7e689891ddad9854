"""Fine-tune LLaMA-style models from one recipe file, with proof of what ran.

import finetune
run = finetune.train.run(finetune.load_recipe("recipes/quickstart.yaml", ["adapter.type=ia3"]))
finetune.evaluate.run(run.path)
"""

from __future__ import annotations

import gc
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from finetune import evaluate, train
    from finetune.recipe import load as load_recipe

__all__ = ["evaluate", "load_recipe", "train"]
__version__ = "0.1.0"
_HEAVY = ("chat", "compare", "evaluate", "merge", "profile", "train")  # they load torch and what stands on it


def __getattr__(name: str) -> Any:
    """Import on first use: `import finetune` stays light."""
    if name in _HEAVY:
        return _imported(f"finetune.{name}")
    if name == "load_recipe":
        return importlib.import_module("finetune.recipe").load
    raise AttributeError(name)


def _imported(name: str) -> ModuleType:
    """A module, imported while no garbage is looked for, and left out of every later look.

    4,600 modules make a million objects that stay. Python's collector would go through them again and again
    while they grow, and once more as the process ends: 4 of the 15 CPU seconds of a run of one step. In the
    process of a command, that is: a program that imports us keeps its collector as it is.
    """
    if "finetune.cli" not in sys.modules or not gc.isenabled():  # or one of these imports another
        return importlib.import_module(name)
    gc.collect()
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
