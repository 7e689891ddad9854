"""The base model and its tokenizer."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.models.architecture import Architecture as Architecture
    from finetune.models.loading import load as load_model
    from finetune.models.model_files import read_config as read_config
    from finetune.models.tokenizer_setup import load_tokenizer as load_tokenizer

__all__ = ["Architecture", "load_model", "load_tokenizer", "read_config"]

__getattr__ = lazy_imports(
    __name__,
    {
        "load_model": "loading.load",
        "load_tokenizer": "tokenizer_setup.load_tokenizer",
        "read_config": "model_files.read_config",
        "Architecture": "architecture.Architecture",
    },
)
