"""The text of a new recipe, with a comment for each key."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from math import sqrt

from finetune.core import strict_yaml
from finetune.core.visible_text import visible
from finetune.recipe import adapter_types

PLAIN = re.compile(r"\w[\w./-]*|[./]+\w[\w./-]*")
MAIN_TYPES = ("lora", "qlora", "dora", "adalora", "ia3", "full")
FULL_RATE = 1e-5  # of full fine-tuning, for models with billions of parameters


@dataclass(frozen=True)
class Answers:
    """The decisions that only a user can make."""

    model: str
    data: str
    validation: str
    """A file, or the share of the examples that is set aside."""
    adapter: str


MAX_LENGTH = 1024


def write(answers: Answers, path: str, columns: str = "", max_length: int = MAX_LENGTH) -> str:
    """Return the YAML text of a recipe.

    Args:
        path: the file of the recipe, for the commands in its head.
        columns: a line for `data.columns`, such as `columns: {instruction: question, output: answer}`.
    """
    kind = adapter_types.find(answers.adapter)
    options = "".join(
        f"  {key}: {_yaml(value)}{NOTES.get(key, '')}\n" for key, value in kind.defaults.items()
    )
    return TEXT.format(
        model=_yaml(answers.model),
        data=_yaml(answers.data),
        validation=_validation(answers.validation),
        path=shlex.quote(path),
        max_length=max_length,
        columns=f"  {columns} # finetune's names: the names in the file\n" if columns else "",
        adapter=answers.adapter,
        others=", ".join(name for name in MAIN_TYPES if name != answers.adapter),
        options=options,
        rate=f"{learning_rate(answers.adapter):g}",
    )


def learning_rate(adapter: str) -> float:
    """Return the middle of the adapter type's usual range on a log scale, with one digit."""
    usual = adapter_types.find(adapter).learning_rate
    return float(f"{sqrt(usual[0] * usual[1]):.0e}") if usual else FULL_RATE


def share(text: str) -> float | None:
    """Return the share that a text states, such as 0.1; `None`: it is a path."""
    try:
        return float(text)
    except ValueError:
        return None


def _validation(given: str) -> str:
    if share(given) is None:
        return f"validation: {_yaml(given)} # examples that are never trained on"
    return f"validation_fraction: {given} # share of the examples that is set aside, or `validation: FILE`"


def _yaml(value: object) -> str:
    """A value in YAML; a string has quotes where YAML would read it as something else."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and strict_yaml.scalar(value) == value:
        return value
    return visible(json.dumps(value, ensure_ascii=False))  # its escapes are valid in YAML


NOTES = {
    "r": " # rank: more parameters and memory",
    "lora_alpha": " # the update is scaled by lora_alpha / r",
    "target_modules": " # every linear layer except the output head",
}
TEXT = """\
# Written by `finetune init`. Check it, plan it and run it:
#
#   finetune check {path}     find mistakes before anything is loaded
#   finetune data {path}      show the tokens that are trained on
#   finetune plan {path}      memory, time and cost
#   finetune train {path}

model:
  name: {model} # a folder, or a model on the Hugging Face Hub

data:
  name: {data} # a file, a folder, or a dataset on the Hub
{columns}  {validation}
  max_length: {max_length} # longest example in tokens; longer examples are skipped and counted

adapter:
  type: {adapter} # or {others}: change only this key to switch the method
{options}
train:
  learning_rate: {rate} # the middle of the usual range for this method
  effective_batch_size: 8 # sequences per optimizer step, over all GPUs
  num_train_epochs: 1
  lr_scheduler_type: cosine
  warmup_steps: 0.03 # a number below 1 is a share of the steps

eval:
  samples: 3 # validation examples shown with the answers of both models
"""
