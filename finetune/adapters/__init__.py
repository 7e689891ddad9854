"""PEFT adapters on a model, with checks of what they matched."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.adapters.peft_configs import peft_config as peft_config
    from finetune.adapters.trainable_parameters import frozen as frozen
    from finetune.adapters.trainable_parameters import trainable as trainable

__all__ = ["frozen", "peft_config", "trainable"]

__getattr__ = lazy_imports(
    __name__,
    {
        "peft_config": "peft_configs.peft_config",
        "frozen": "trainable_parameters.frozen",
        "trainable": "trainable_parameters.trainable",
    },
)
