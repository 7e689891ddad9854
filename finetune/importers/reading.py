"""Read another tool's file, find out which tool it is for, and translate it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from finetune.core import strict_yaml
from finetune.core.errors import Problem, UserError
from finetune.importers import axolotl, llamafactory, trl
from finetune.importers.translation import Translation

TOOLS = {"axolotl": axolotl, "llamafactory": llamafactory, "trl": trl}
KEYS = {  # tool -> keys that only this tool has
    "axolotl": {
        "base_model",
        "datasets",
        "micro_batch_size",
        "sequence_len",
        "sample_packing",
        "val_set_size",
    },
    "llamafactory": {"stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_rank"},
    "trl": {"dataset_name", "use_peft", "lora_r", "max_length", "dataset_train_split", "assistant_only_loss"},
}
ELSEWHERE = {  # a word of the file -> what the file is, and what to read in it
    "FastLanguageModel": ("a script of Unsloth", "its `get_peft_model` and `SFTConfig` calls"),
    "_component_:": ("a torchtune config", "its model, dataset and optimizer entries"),
}


def import_recipe(path: str | Path, tool: str | None = None, gpus: int = 1) -> Translation:
    """Translate a file of another tool.

    Args:
        path: a YAML config, or a file with a `trl sft` command line.
        tool: axolotl, llamafactory or trl; `None`: found by the file's keys.
        gpus: the number of GPUs that the other tool trained on, for the effective batch size.

    Returns:
        The recipe and what became of each key.

    Raises:
        UserError: the file can't be read, its tool is not known, or it is not for supervised fine-tuning (2).
    """
    path = Path(path)
    try:
        text = strict_yaml.text_of(path, "the file to import")
    except OSError as error:
        raise UserError(
            Problem(f"cannot read the file: {error.strerror}", where=str(path), code="import")
        ) from error
    for word, (kind, parts) in ELSEWHERE.items():
        if word in text:
            instead = f"read {parts}, and answer the questions of `finetune init`"
            raise UserError(
                Problem(f"finetune can't import {kind}", where=str(path), fix=instead, code="import")
            )
    source = _command_line(text, str(path)) if _is_command(text) else _yaml(text, str(path))
    tool = tool or _tool_of(source, text, str(path))
    state = Translation(TOOLS[tool].TOOL, source)
    if not source.get("base_model" if tool == "axolotl" else "model_name_or_path"):
        what = f"the file names no model, so it is no {TOOLS[tool].TOOL} training config"
        raise UserError(Problem(what, where=str(path), code="import"))
    TOOLS[tool].translate(state, str(path), gpus)
    return state


def _is_command(text: str) -> bool:
    return bool(re.search(r"(^|[\s/])trl\s+\w+\s|scripts?/sft\.py\s", text))


def _command_line(text: str, where: str) -> dict[str, Any]:
    """The arguments of `trl sft` in a shell script."""
    joined = re.sub(r"\\\s*\n", " ", text)
    line = next(
        line for line in joined.split("\n") if re.search(r"(^|[\s/])trl\s+\w+\s|scripts?/sft\.py\s", line)
    )
    words = shlex.split(line.strip(), comments=True)
    start = next(i for i, word in enumerate(words) if word.endswith("trl") or word.endswith("sft.py"))
    kind = words[start + 1] if words[start].endswith("trl") else "sft"
    if kind != "sft":
        from finetune.importers.common import not_sft

        raise not_sft("TRL", f"`trl {kind}`", where)
    found: dict[str, Any] = {}
    key = ""
    for word in words[start + 1 :]:
        if word.startswith("--"):
            key, equals, value = word[2:].replace("-", "_").partition("=")
            found[key] = strict_yaml.scalar(value) if equals else True
        elif key:
            value = strict_yaml.scalar(word)
            before = found[key]
            found[key] = (
                value if before is True else [*(before if isinstance(before, list) else [before]), value]
            )
    if isinstance(config := found.pop("config", None), str):
        nested = Path(where).parent / config
        found = {**_yaml(strict_yaml.text_of(nested, "the config"), str(nested)), **found}
    return found


def _yaml(text: str, where: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UserError(
            Problem(
                "the file is not valid YAML",
                where=place,
                found=str(getattr(error, "problem", error)),
                code="yaml-syntax",
            )
        ) from error
    if not isinstance(found, dict):
        raise UserError(Problem("the file is no mapping of settings", where=where, code="import"))
    return {str(key): value for key, value in found.items()}


def _tool_of(source: dict[str, Any], text: str, where: str) -> str:
    """The tool whose keys the file has most of."""
    if _is_command(text):
        return "trl"
    counts = {tool: len(keys & set(source)) for tool, keys in KEYS.items()}
    best = max(counts, key=lambda tool: counts[tool])
    others = [tool for tool in counts if tool != best and counts[tool] == counts[best]]
    if not counts[best] or others:
        fix = "--from axolotl, --from llamafactory or --from trl"
        raise UserError(
            Problem("finetune can't tell which tool this file is for", where=where, fix=fix, code="import")
        )
    return best
