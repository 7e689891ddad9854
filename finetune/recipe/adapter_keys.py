"""The keys that an adapter type may have in a recipe: PEFT's fields for the type, and finetune's own keys."""

from __future__ import annotations

from typing import Any

from finetune.recipe import adapter_types, upstream_options
from finetune.recipe.schema import ADALORA_KEYS, LORA_KEYS, PEFT_KEYS


def own_keys(kind: adapter_types.AdapterType) -> dict[str, Any]:
    """Return the keys that finetune adds for this type: name -> (annotation, pydantic field)."""
    own = {"lora": LORA_KEYS, "adalora": ADALORA_KEYS}.get(kind.peft, {})
    return {**PEFT_KEYS, **own} if kind.peft else {}


def adapter_keys(name: str) -> frozenset[str]:
    """Return every key that `adapter:` may have under `type: name`."""
    kind = adapter_types.find(name)
    return kind.keys | {"type", *own_keys(kind)}


def is_left_out(name: str, key: str) -> bool:
    """Return whether PEFT has this key for the type. Recipes can't set all of PEFT's keys."""
    kind = adapter_types.all_types().get(name)
    return kind is not None and key in upstream_options.fields(kind.sources)
