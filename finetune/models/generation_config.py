"""Read and repair a model's generation config."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig


def declared_stops(generation: GenerationConfig) -> set[int]:
    """Return the token ids that end an answer by the model's own generation config."""
    ids = generation.eos_token_id
    return set(ids if isinstance(ids, list) else [ids]) - {None}


def settle_generation(generation: GenerationConfig, stops: list[int]) -> list[str]:
    """Adapt the base model's generation config for the saved model, and return the changes.

    Args:
        stops: token ids that end an answer, from `scoring.stop_ids`.
    """
    notes = []
    if declared_stops(generation) != set(stops):
        other = f"eos_token_id {stops} in generation_config.json, in place of {generation.eos_token_id}"
        notes.append(f"finetune saves {other}, because the answers of this run end with it")
        generation.eos_token_id = stops
    return notes + _storable(generation)


def _storable(generation: GenerationConfig) -> list[str]:
    """Change values that transformers loads but refuses to save in a generation config."""
    refused, sampling = _refused(generation), generation.do_sample
    if not refused:
        return []
    generation.do_sample = True
    left = _refused(generation)
    if left == refused:
        generation.do_sample = sampling
    mended = ", ".join(f"{name} {getattr(generation, name)}" for name in refused if name not in left)
    notes = [f"finetune saves generation_config.json with do_sample: true, which {mended} of the base needs"]
    for name in left:
        value = getattr(generation, name)
        notes.append(f"finetune saves generation_config.json without the base's {name} {value}")
        setattr(generation, name, None)
    return notes if mended else notes[1:]


def _refused(generation: GenerationConfig) -> list[str]:
    """Return the values that transformers refuses to save in a generation config."""
    try:
        generation.validate(strict=True)
    except ValueError as error:
        return re.findall(r"^- `(\w+)`", str(error), re.MULTILINE)
    return []
