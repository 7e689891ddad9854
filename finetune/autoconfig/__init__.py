"""Decide every `auto`. The plan and the run call the same functions."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.autoconfig.attention_choice import choose as choose_attention
    from finetune.autoconfig.base_quantization import choose_base as choose_base
    from finetune.autoconfig.compilation import choose_compile as choose_compile
    from finetune.autoconfig.machine_setup import Setup as Setup
    from finetune.autoconfig.machine_setup import choose as choose

__all__ = ["Setup", "choose", "choose_attention", "choose_base", "choose_compile"]

__getattr__ = lazy_imports(
    __name__,
    {
        "Setup": "machine_setup.Setup",
        "choose": "machine_setup.choose",
        "choose_attention": "attention_choice.choose",
        "choose_compile": "compilation.choose_compile",
        "choose_base": "base_quantization.choose_base",
    },
)
