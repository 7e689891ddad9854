"""The type of a model's config."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PreTrainedConfig

    # Transformers' own, or what `models/architecture.py` reads of a config.json without an import of torch
    ModelConfig: TypeAlias = PreTrainedConfig | SimpleNamespace
