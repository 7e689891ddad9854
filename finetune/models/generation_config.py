"""Read and repair a model's generation config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.core import untrusted_files
from finetune.core.config_values import FIX
from finetune.core.errors import Problem, UserError, first_line

if TYPE_CHECKING:
    from transformers import GenerationConfig

NAME = "generation_config.json"
# Keys whose numbers transformers accepts, so that most models need no import of it
_USUAL = frozenset(
    {
        "_from_model_config", "bos_token_id", "do_sample", "eos_token_id", "max_length", "min_p",
        "pad_token_id", "repetition_penalty", "temperature", "top_k", "top_p", "transformers_version",
        "use_cache",
    }
)  # fmt: skip


def check(folder: Path) -> None:
    """Check that transformers accepts the generation config of a model's folder (exit 2)."""
    path = folder / NAME
    if not path.is_file():
        return
    content = untrusted_files.read_object(path, "model.name")
    lists = {name for name, value in content.items() if isinstance(value, dict | list)}
    if content.keys() <= _USUAL and lists <= {"eos_token_id"}:
        return
    from transformers import GenerationConfig

    try:
        if methods := [name for name in content if hasattr(GenerationConfig, name)]:
            raise ValueError(f"{', '.join(methods)} would replace a method")
        GenerationConfig.from_dict(content)
    except Exception as error:  # transformers raises many types for values of a wrong type
        raise UserError(
            Problem(
                "transformers does not accept the model's generation config",
                "model.name",
                where=str(path),
                found=first_line(error),
                fix=FIX,
                code="model-config",
            )
        ) from error


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
