"""Download from the Hugging Face Hub and upload to it."""

from typing import TYPE_CHECKING

from finetune.core.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from finetune.hub.client import download as download
    from finetune.hub.client import upload as upload

__all__ = ["download", "upload"]

__getattr__ = lazy_imports(__name__, {"download": "client.download", "upload": "client.upload"})
