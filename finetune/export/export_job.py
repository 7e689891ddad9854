"""What an export is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from finetune.export.serving_check import Expected


@dataclass(frozen=True)
class ExportJob:
    """A merged model with what finetune expects of the exported one."""

    name: str
    source: Path
    """The folder with the merged weights, or with the adapter."""
    config: PreTrainedConfig
    tokenizer: Any
    expected: Expected
    quantize: str
    base: str
    """Name or folder of the base model."""
    revision: str | None = None
    """Branch, tag or commit of a base model on the Hub."""
    stored: str = ""
    """The quantization of the base model in training, if there was one."""
    chats: bool = True
    """Whether the run trained on chats."""
