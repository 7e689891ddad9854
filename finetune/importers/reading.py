"""Read another tool's file, find out which tool it is for, and translate it."""

from __future__ import annotations

import copy
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

from finetune.core import foreign_yaml, paths, strict_yaml
from finetune.core.errors import Problem, UserError
from finetune.core.formatting import shortened
from finetune.importers import axolotl, common, llamafactory, recipe_text, trl
from finetune.importers.translation import TooLarge, Translation
from finetune.recipe import loader, recipe_errors

LONGEST = 200  # characters of a value in a message
ROUNDS = 3  # a value can be wrong because of another one that was removed
OPTIONAL = ("adapter.", "speed.", "train.", "eval.", "publish.")
_SCRIPT = re.compile(r"^[^\S\n]*(from|import)[^\S\n]+trl\b", re.MULTILINE)
SCRIPTS = (
    "dpo",
    "gkd",
    "grpo",
    "kto",
    "online_dpo",
    "orpo",
    "ppo",
    "reward",
    "rloo",
    "sft",
)  # of `trl/scripts`
_COMMAND = re.compile(rf"(^|[\s/])trl\s+[a-z-]+\s+--?\w|scripts?/({'|'.join(SCRIPTS)})\.py(\s|$)")
_OPERATOR = re.compile(r"\d*[<>]|&|\||;")  # of a shell, after the words of a command
BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
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
    "trl": {
        "dataset_name",
        "use_peft",
        "lora_r",
        "max_length",
        "dataset_train_split",
        "assistant_only_loss",
        "datasets",
        "test_split_size",
    },
}
MODELS = {  # tool -> the key of the model
    "axolotl": "base_model",
    "llamafactory": "model_name_or_path",
    "trl": "model_name_or_path",
}
ELSEWHERE = {  # a word of the file -> what the file is, and what to read in it
    "FastLanguageModel": ("a script of Unsloth", "its `get_peft_model` and `SFTConfig` calls"),
    "_component_:": ("a torchtune config", "its model, dataset and optimizer entries"),
}
OTHER_CONFIGS = {  # a key of the file -> what the file is, and what to do with it
    "compute_environment": ("an accelerate config", "use it with `finetune train RECIPE --accelerate FILE`"),
    "train_dataset": (
        "a config of LLaMA-Factory's v1",
        "write the values with the keys of its stable version, such as `model_name_or_path`",
    ),
    "dist_config": (
        "a config of LLaMA-Factory's v1",
        "write the values with the keys of its stable version, such as `model_name_or_path`",
    ),
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
    text = _text(path)
    for word, (kind, parts) in ELSEWHERE.items():
        if word in text:
            raise UserError(
                Problem(
                    f"finetune can't import {kind}",
                    where=str(path),
                    fix=f"read {parts}, and answer the questions of `finetune init`",
                    code="import",
                )
            )
    words = _command_words(text, str(path))
    if not words and (path.suffix == ".py" or _SCRIPT.search(text)):
        raise UserError(
            Problem(
                f"finetune can't import a Python script{' of TRL' if _SCRIPT.search(text) else ''}",
                where=str(path),
                fix=(
                    "write the values of its SFTConfig and ModelConfig into a YAML file, and import that file"
                ),
                code="import",
            )
        )
    source = _arguments(words, str(path)) if words else _yaml(text, str(path))
    for key, (kind, instead) in OTHER_CONFIGS.items():
        if key in source:
            raise UserError(
                Problem(f"finetune can't import {kind}", where=str(path), fix=instead, code="import")
            )
    tool = tool or ("trl" if words else _tool_of(source, str(path)))
    if tool != "llamafactory":  # which takes any string as true
        source = {key: _boolean(key, value) for key, value in source.items()}
    state = Translation(TOOLS[tool].TOOL, source)
    if not source.get(MODELS[tool]):
        raise UserError(
            Problem(
                f"the file names no model, so it is no {TOOLS[tool].TOOL} training config",
                where=str(path),
                fix="name the file that `axolotl train`, `llamafactory-cli train` or `trl sft` gets",
                code="import",
                found=shortened(", ".join(map(str, source)), LONGEST),
                expected=f"the key {MODELS[tool]}",
            )
        )
    try:
        TOOLS[tool].translate(state, str(path), gpus)
    except TooLarge as error:
        raise UserError(_too_large(str(path), "")) from error
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise UserError(
            Problem(
                f"{state.tool} does not accept this value",
                state.taken[0],
                where=str(path),
                found=repr(state.taken[1])[:LONGEST],
                fix="correct the value, or remove the key",
                code="import",
            )
        ) from error
    if not state.recipe.get("data.name"):
        raise UserError(
            Problem(
                f"the file names no dataset, so it is no {state.tool} training config",
                where=str(path),
                fix=(
                    "use `finetune merge` for a file that merges an adapter, and "
                    "`finetune chat` for one that chats"
                ),
                code="import",
            )
        )
    _drop_refused(state, path)
    try:
        strict_yaml.parse(recipe_text.write(state, str(path)), str(path))
    except UserError as error:
        raise UserError(_too_large(str(path), error.problems[0].what)) from error
    return state


def _drop_refused(state: Translation, where: Path) -> None:
    """Remove values that finetune does not accept, such as an optimizer of the tool, and say why.

    Values of the model and the data stay, because a run without them would be another run.
    """
    for _ in range(ROUNDS):
        values: dict[str, Any] = {}
        for key, value in state.recipe.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = copy.deepcopy(value)
        try:
            loader.from_values(values, where)
        except UserError as error:
            for problem in error.problems:
                key = ".".join(problem.key.split(".")[:2])
                if key in state.recipe and key.startswith(OPTIONAL) and key != "adapter.type":
                    fix = f"; {problem.fix}" if problem.fix else "; kept finetune's default"
                    state.refuse(key, f"finetune does not accept it: {problem.what}{fix}")
        else:
            return


def _text(path: Path) -> str:
    try:
        return strict_yaml.text_of(path, "the file to import")
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        raise UserError(
            Problem(
                "finetune can't read the file",
                where=str(path),
                found=getattr(error, "strerror", None) or str(error),
                fix=paths.similar_files(path) or "correct the path, or its permissions",
                code="import",
            )
        ) from error


def _boolean(key: str, value: object) -> object:
    """Return the boolean in a string such as "false", as axolotl and TRL read it."""
    if key.endswith(("strategy", "mixed_precision")) or not isinstance(value, str):
        return value  # `save_strategy: "no"` is a name
    return BOOLEANS.get(value.lower(), value)


def _too_large(where: str, found: str) -> Problem:
    return Problem(
        "the recipe of this file would be too large",
        where=where,
        found=found,
        expected=f"at most {strict_yaml.MAX_BYTES:,} characters and {strict_yaml.MOST_VALUES:,} values",
        fix=foreign_yaml.SHORTER,
        why="finetune reads no larger recipe",
        code="import",
    )


def _command_words(text: str, where: str) -> list[str]:
    """Return the words of the `trl` command after the program, or an empty list without one.

    Raises:
        UserError: a line is not valid shell syntax, or there are several commands (exit 2).
    """
    joined, found = re.sub(r"\\[^\S\n]*\n", " ", text), list[list[str]]()
    for line in joined.split("\n"):
        if not _COMMAND.search(line):
            continue
        try:
            words = shlex.split(line.strip(), comments=True)
        except ValueError as error:
            raise UserError(
                Problem(
                    "the command line is not valid shell syntax",
                    where=where,
                    found=str(error),
                    fix="close the quote in this line: " + shortened(line.strip(), 80),
                    why="a shell would not run it either",
                    code="import",
                )
            ) from error
        for is_operator, command in itertools.groupby(words, lambda word: bool(_OPERATOR.match(word))):
            if not is_operator and (after := _after_program(list(command))):
                found.append(after)
    if len(found) > 1:
        raise UserError(
            Problem(
                "the script has several trl commands",
                where=where,
                found=f"{len(found)} commands",
                fix="put each command into a file of its own",
                why="a recipe describes one run",
                code="import",
            )
        )
    return found[0] if found else []


def _after_program(words: list[str]) -> list[str]:
    """Return the words after `trl` or its script in one command of a shell, or an empty list without them."""
    for place, word in enumerate(words):
        if word.endswith(".py") and Path(word).stem in SCRIPTS:
            return [Path(word).stem, *words[place + 1 :], *_of_launcher(words[:place])]
        if Path(word).name == "trl" and words[place + 1 :]:
            return [*words[place + 1 :], *_of_launcher(words[:place])]
    return []


def _of_launcher(words: list[str]) -> list[str]:
    """Return the flags of `accelerate launch` or `torchrun` that `trl sft` has too, by its names."""
    names = {"config_file": "accelerate_config", "num_processes": "num_processes"}
    names |= {"nproc_per_node": "num_processes"}
    parts = [part for word in words for part in word.split("=", 1)]
    flags = {
        flag.lstrip("-").replace("-", "_"): value
        for flag, value in itertools.pairwise(parts)
        if flag.startswith("-")
    }
    found = {names[flag]: value for flag, value in flags.items() if flag in names}
    if "nproc_per_node" in flags:
        counts = flags["nproc_per_node"], flags.get("nnodes", "1")
        if all(count.isdecimal() for count in counts):
            found["num_processes"] = str(int(counts[0]) * int(counts[1]))
        else:  # such as `gpu` or 1:4
            del found["num_processes"]
    return [word for name, value in found.items() for word in (f"--{name}", value)]


def _arguments(words: list[str], where: str) -> dict[str, Any]:
    """Return the arguments of `trl sft`, with the arguments of its `--config`."""
    if words[0] != "sft":
        raise common.not_sft("TRL", f"`trl {words[0]}`", where)
    given: dict[str, list[Any]] = {}
    key = ""
    for word in words[1:]:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            given[key] = [strict_yaml.scalar(value)] if equals else []
            if key.startswith("no_") and not equals:
                key = key.removeprefix("no_")
                given[key] = [False]
                del given[f"no_{key}"]
        elif key:
            given[key].append(strict_yaml.scalar(word))
    found = {key: values if values[1:] else values[0] if values else True for key, values in given.items()}
    if isinstance(config := found.pop("config", None), str):
        nested = Path(where).parent / config
        found = {**_yaml(_text(nested), str(nested)), **found}
    return found


def _yaml(text: str, where: str) -> dict[str, Any]:
    found = foreign_yaml.read(text, where, unique=True)
    if not isinstance(found, dict):
        raise UserError(
            Problem(
                "the file is no mapping of settings",
                where=where,
                found=recipe_errors.show(found),
                expected="lines such as `learning_rate: 2e-4`",
                fix="name the file that `axolotl train`, `llamafactory-cli train` or `trl sft` gets",
                why="each setting becomes a key of the recipe",
                code="import",
            )
        )
    return found


def _tool_of(source: dict[str, Any], where: str) -> str:
    """The tool whose keys the file has most of. Each tool has one name for the model."""
    counts = {tool: len(keys & set(source)) for tool, keys in KEYS.items()}
    for tool in counts:
        others = {MODELS[other] for other in MODELS} - {MODELS[tool]}
        if MODELS[tool] not in source and others & set(source):
            counts[tool] = 0
    best = max(counts, key=lambda tool: counts[tool])
    others = [tool for tool in counts if tool != best and counts[tool] == counts[best]]
    if not counts[best] or others:
        raise UserError(
            Problem(
                "finetune can't tell which tool this file is for",
                where=where,
                found=shortened(", ".join(map(str, source)), 200),
                fix="--from axolotl, --from llamafactory or --from trl",
                why="finetune compares these keys with the keys of each tool",
                code="import",
            )
        )
    return best
