"""Token ids and labels from axolotl or LLaMA-Factory itself, where the tool is installed."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import json
from typing import TYPE_CHECKING, Any

from finetune.core import packages
from finetune.core.errors import first_line
from finetune.importers.prompt_formats import NotCompared, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from finetune.data.examples import Example, Row
    from finetune.importers.translation import Translation

PACKAGES = {"axolotl": "axolotl", "LLaMA-Factory": "llamafactory"}
ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError)


def reader_of(
    state: Translation, tokenizer: PreTrainedTokenizerBase, limit: int
) -> Callable[[Example, Row], Tokens] | None:
    """Return the tool's own function from an example to its token ids and labels; `None` if not installed.

    Args:
        limit: the most tokens of an example.
    """
    if not packages.installed(PACKAGES[state.tool]):
        return None
    try:
        tool = _axolotl if state.tool == "axolotl" else _llamafactory
        read = tool(state.given, copy.deepcopy(tokenizer), limit)
    except ERRORS as error:
        raise NotCompared(f"{state.tool} does not open its config: {first_line(error)}") from error

    def reader(example: Example, row: Row) -> Tokens:
        try:
            return read(example, row)
        except ERRORS as error:
            raise NotCompared(f"{state.tool} does not read the example: {first_line(error)}") from error

    return reader


def name_of(tool: str) -> str:
    """Return the tool with its version."""
    try:
        return f"{tool} {importlib.metadata.version(PACKAGES[tool])}"
    except importlib.metadata.PackageNotFoundError:  # a checkout
        return tool


def _axolotl(given: dict[str, Any], tokenizer: Any, limit: int) -> Callable[[Example, Row], Tokens]:
    strategies = importlib.import_module("axolotl.prompt_strategies")
    settings = importlib.import_module("axolotl.utils.dict").DictDefault
    source = dict(given["datasets"][0])
    source["chat_template"] = source.get("chat_template") or given.get("chat_template") or "tokenizer_default"
    kind = str(source["type"]).partition(":")[0]
    config = settings({**given, "sequence_len": limit})
    if kind == "alpaca":
        tokenizers = importlib.import_module("axolotl.prompt_tokenizers")
        prompter = importlib.import_module("axolotl.prompters").AlpacaPrompter()
        on_inputs = bool(given.get("train_on_inputs"))
        strategy = tokenizers.AlpacaPromptTokenizingStrategy(prompter, tokenizer, on_inputs, limit)
    else:
        strategy = strategies.load(kind, tokenizer, config, settings(source))
    if strategy is None:
        raise NotCompared(f"axolotl does not know the type {kind}")

    def read(_: Example, row: Row) -> Tokens:
        if kind.partition(".")[0] == "completion":  # it reads columns, and cuts a text into pieces
            found = strategy.tokenize_prompt({name: [value] for name, value in row.value.items()})
            return Tokens(list(found["input_ids"][0]), list(found["labels"][0]))
        found = strategy.tokenize_prompt(copy.deepcopy(row.value))
        return Tokens(list(found["input_ids"]), list(found["labels"]))

    return read


def _llamafactory(given: dict[str, Any], tokenizer: Any, limit: int) -> Callable[[Example, Row], Tokens]:
    templates = importlib.import_module("llamafactory.data.template")
    processors = importlib.import_module("llamafactory.data.processor.supervised")
    arguments = importlib.import_module("llamafactory.hparams.data_args")
    names = ("template", "train_on_prompt", "mask_history", "tool_format", "default_system")
    names += ("enable_thinking", "preserve_thinking")
    options = {name: given[name] for name in names if given.get(name) is not None}
    settings = arguments.DataArguments(cutoff_len=limit, **options)
    template = templates.get_template_and_fix_tokenizer(tokenizer, settings)
    processor = processors.SupervisedDatasetProcessor(template, tokenizer, None, settings)

    def read(example: Example, _: Row) -> Tokens:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in example.messages or ()]
        system = turns.pop(0)["content"] if turns[0]["role"] == "system" else None
        tools = json.dumps(example.tools) if example.tools else None
        chat = {"_prompt": turns[:-1], "_response": turns[-1:], "_system": system, "_tools": tools}
        media = dict.fromkeys(("_images", "_videos", "_audios"))
        found = processor.preprocess_dataset({name: [value] for name, value in {**chat, **media}.items()})
        if not found.get("input_ids"):
            raise NotCompared("LLaMA-Factory drops this example")
        return Tokens(found["input_ids"][0], found["labels"][0])

    return read
