"""Fine-tune LLaMA-style models from one recipe file, and check that the run used its settings.

>>> import finetune
>>> recipe = finetune.load_recipe("recipes/quickstart.yaml", ["adapter.type=ia3"])
>>> run = finetune.train(recipe)
>>> finetune.evaluate(run)
"""

TYPE_CHECKING = False  # nothing is imported here: `python -m finetune` looks in the working directory first
if TYPE_CHECKING:
    from typing import Any

    from finetune import speed
    from finetune.api import (
        Recipe,
        Run,
        check,
        evaluate,
        export_model,
        import_recipe,
        load_model,
        load_recipe,
        merge,
        plan,
        publish,
        train,
    )

__all__ = [
    "Recipe",
    "Run",
    "check",
    "evaluate",
    "export_model",
    "import_recipe",
    "load_model",
    "load_recipe",
    "merge",
    "plan",
    "publish",
    "speed",
    "train",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> "Any":
    """Import a public name on first use, so that `import finetune` stays fast."""
    if name == "speed":
        import importlib

        return importlib.import_module("finetune.speed")
    if name in __all__:
        from finetune import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
