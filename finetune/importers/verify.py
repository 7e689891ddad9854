"""Compare the first batch of an imported recipe with the tool's own token ids and labels."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.metadata
import json
import tempfile
from collections import Counter
from functools import partial
from importlib.metadata import version
from itertools import groupby, islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core import packages
from finetune.core.errors import Problem, UserError, first_line
from finetune.core.visible_text import visible
from finetune.data import preparation, source_loading
from finetune.data.chat_texts import render_chat
from finetune.data.encoding import Encoded, make_encoder
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert, detect
from finetune.data.loss_mask import IGNORED
from finetune.importers import prompt_formats
from finetune.importers.prompt_formats import NotCompared, Tokens
from finetune.importers.translation import NOT_SUPPORTED
from finetune.preflight import token_checks

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from finetune.importers.translation import Translation
    from finetune.recipe.schema import Recipe

AXOLOTL_TYPES = ("alpaca", "chat_template", "completion", "sharegpt")
SHOWN = 60  # characters of a text in a difference
TRL_COLUMNS = ("messages", "conversations", "prompt", "completion", "text", "tools")
PACKAGES = {"axolotl": "axolotl", "LLaMA-Factory": "llamafactory"}
# Errors that a tool may raise for a config or an example that it does not read.
TOOL_ERRORS = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError)


class Difference(NamedTuple):
    """A difference that finetune found in one or more examples."""

    text: str
    examples: int


class Verified(NamedTuple):
    """The comparison of a batch."""

    by: str
    """Where the tool's token ids come from."""
    examples: int
    same: int
    """Number of examples with the same token ids and labels."""
    differences: list[Difference]

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        head = f"verify: {self.same} of the first {self.examples} examples have the same token ids and labels"
        found = [f"difference: {visible(text)} (examples: {count})" for text, count in self.differences]
        return [f"{head} as by {self.by}", *found]


def verify(state: Translation, recipe: Recipe) -> Verified:
    """Compare the examples of the first batch, in the order of the data.

    Args:
        state: the import that gave the recipe.

    Raises:
        UserError: the data or the tokenizer can't be read (exit 2 or 3).
    """
    size = recipe.train.per_device_train_batch_size
    rows = _first_rows(recipe, size if isinstance(size, int) else 1)
    # the tool's ids first: finetune's encoder switches off truncation and padding of the tokenizer
    by, theirs = _of_tool(state, recipe, rows)
    ours, tokenizer = _of_finetune(recipe, rows)
    counts, same = Counter[str](), 0
    for own, other in zip(ours, theirs, strict=True):
        if isinstance(own, str) or isinstance(other, str):
            found = dict.fromkeys(text for text in (own, other) if isinstance(text, str))
        else:
            found = dict.fromkeys(_differences(own, other, tokenizer, state.tool))
        same += not found
        counts.update(list(found))
    return Verified(by, len(rows), same, [Difference(*one) for one in counts.most_common()])


def _first_rows(recipe: Recipe, count: int) -> list[Row]:
    source = source_loading.sources(recipe.data)[0]
    rows = source_loading.read(source, "data.name")
    found = list(islice((row for row in rows if isinstance(row, Row)), count))
    if not found:
        raise UserError(Problem("the data has no example to compare", "data.name", code="data-empty"))
    return found


def _of_finetune(recipe: Recipe, rows: list[Row]) -> tuple[list[Tokens | str], Any]:
    """Return finetune's ids and labels of each row, or why it trains on none; and the tokenizer."""
    tokens = token_checks.load_model_tokens(recipe)
    examples = [_example(recipe, row) for row in rows]
    chats = any(example.messages for example in examples if isinstance(example, Example))
    encoder, found = make_encoder(tokens.tokenizer, recipe.data, chats, tokens.ends), list[Tokens | str]()
    for example in examples:
        encoded = encoder([example])[0] if isinstance(example, Example) else example
        if isinstance(example, BadRow) or isinstance(encoded, BadRow):
            found.append(f"finetune does not accept the example: {encoded}")
            continue
        documents = preparation.fit(encoded, example, recipe.data, encoder)
        if isinstance(documents, str):
            found.append(f"finetune skips the example: {documents}; the tool may cut it")
        else:
            found.append(_tokens(documents[0]))
    return found, tokens.tokenizer


def _tokens(document: Encoded) -> Tokens:
    return Tokens(document.ids, [IGNORED, *document.labels()[1:]])


def _example(recipe: Recipe, row: Row) -> Example | BadRow:
    try:
        return convert(row, recipe.data, detect(row, recipe.data))
    except BadRow as bad:
        return bad


def _of_tool(state: Translation, recipe: Recipe, rows: list[Row]) -> tuple[str, list[Tokens | str]]:
    """Return where the tool's ids come from, and ids and labels of each row or why there are none."""
    if state.tool == "TRL":
        return f"TRL {version('trl')}", _of_trl(recipe, rows)
    tokenizer, found = token_checks.load_with_template(recipe), list[Tokens | str]()
    limit, reason = recipe.data.max_length, ""
    if error := _template_error(recipe, rows, tokenizer):
        return name_of(state.tool), [f"not compared: {error}"] * len(rows)
    try:
        reader = reader_of(state, tokenizer, limit)
    except NotCompared as error:
        reader, reason = None, f" ({error})"
    for row in rows:
        example = _example(recipe, row)
        if isinstance(example, BadRow):
            found.append(f"finetune does not accept the example: {example}")
            continue
        try:
            own = reader or partial(_by_format, state, recipe, tokenizer)
            ids, labels = own(example, row)
        except NotCompared as error:
            found.append(f"not compared: {error}")
            continue
        found.append(Tokens(ids[:limit], [IGNORED, *labels[1:limit]]))
    if reader:
        return name_of(state.tool), found
    return f"finetune's own implementation of {state.tool}'s prompt formats{reason}", found


def _by_format(
    state: Translation, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, example: Example, row: Row
) -> Tokens:
    keys = {entry.key: entry.value for entry in state.entries}
    on_all = recipe.data.train_on == "all"
    if state.tool == "axolotl":
        kind = str(keys.get("datasets.0.type") or "").partition(":")[0].partition(".")[0]
        _refuse_other_labels(state)
        return prompt_formats.of_axolotl(
            example,
            row,
            tokenizer,
            kind,
            on_prompt=on_all,
            ends=[entry.value for entry in state.entries if entry.key == "eot_tokens"],
        )
    template, last_turn = str(keys.get("template") or ""), recipe.data.train_on == "last_turn"
    return prompt_formats.of_llamafactory(example, tokenizer, template, on_prompt=on_all, last_turn=last_turn)


def _refuse_other_labels(state: Translation) -> None:
    """Raise NotCompared if the first source trains on other turns, or other ends of turns, by a key."""
    names = {f"datasets.0.{name}" for name in ("roles_to_train", "train_on_eos", "train_on_eot")}
    for entry in state.entries:
        if entry.key in names and entry.kind == NOT_SUPPORTED:
            raise NotCompared(f"finetune does not know axolotl's labels with {entry.key}: {entry.value}")


def _of_trl(recipe: Recipe, rows: list[Row]) -> list[Tokens | str]:
    """Let TRL's trainer prepare the rows, with a model of one small layer."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer, data = token_checks.load_with_template(recipe), recipe.data
    if error := _template_error(recipe, rows, tokenizer):
        return [f"not compared: {error}"] * len(rows)
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    renamed = {theirs: ours for ours, theirs in data.columns.items()}
    values = [{renamed.get(key, key): value for key, value in row.value.items()} for row in rows]
    columns = [name for name in TRL_COLUMNS if any(name in value for value in values)]
    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            folder,
            max_length=data.max_length,
            assistant_only_loss=data.train_on == "assistant",
            completion_only_loss=True if data.train_on == "completion" else None,
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        try:
            dataset = Dataset.from_list([{name: value.get(name) for name in columns} for value in values])
            trainer = SFTTrainer(model, settings, train_dataset=dataset, processing_class=tokenizer)
        except UserError:
            raise
        except Exception as error:  # of TRL, or of a library that reads or renders the examples
            return [f"TRL does not accept the examples: {first_line(error)}"] * len(rows)
    prepared: Any = trainer.train_dataset
    return [Tokens(row["input_ids"], [IGNORED, *row["labels"][1:]]) for row in prepared]


def _template_error(recipe: Recipe, rows: list[Row], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why the chat template does not render the rows within finetune's limits, which TRL lacks."""
    examples = [_example(recipe, row) for row in rows]
    chats = [one for one in examples if isinstance(one, Example) and one.messages]
    try:
        for chat, prompt in product(chats, (False, True)):
            render_chat(tokenizer, chat.messages or [], chat.tools, prompt=prompt)
    except ValueError as error:
        return f"the chat template does not render an example: {first_line(error)}"
    return ""


def _differences(ours: Tokens, theirs: Tokens, tokenizer: PreTrainedTokenizerBase, tool: str) -> list[str]:
    """Describe each range of tokens that only one side has, and each that only one side trains on."""
    found = list[str]()
    matcher = difflib.SequenceMatcher(None, ours.ids, theirs.ids, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            own, other = (_shown(tokenizer, ids) for ids in (ours.ids[a:b], theirs.ids[c:d]))
            found.append(f"token ids: finetune has {own}, {tool} has {other}")
            continue
        pairs = zip(ours.ids[a:b], ours.labels[a:b], theirs.labels[c:d], strict=True)
        sides = [(token, own != IGNORED, other != IGNORED) for token, own, other in pairs]
        for (own, other), run in groupby(sides, key=lambda one: one[1:]):
            if own != other:
                text = _shown(tokenizer, [token for token, *_ in run])
                who, no = ("finetune", tool) if own else (tool, "finetune")
                found.append(f"labels: {who} trains on {text}, and {no} does not")
    return found


def _shown(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    text = repr(tokenizer.decode(ids))
    return f"{text[:SHOWN]}..." if len(text) > SHOWN else text if ids else "nothing"


def reader_of(
    state: Translation, tokenizer: PreTrainedTokenizerBase, limit: int
) -> Callable[[Example, Row], Tokens] | None:
    """Return the tool's own function from an example to its token ids and labels; `None` if not installed.

    Args:
        limit: the most tokens of an example.
    """
    if not packages.installed(PACKAGES[state.tool]):
        return None
    sources = [state.given, *(one for one in state.given.get("datasets") or () if isinstance(one, dict))]
    templates = {str(one["chat_template_jinja"]) for one in sources if one.get("chat_template_jinja")}
    if templates - {str(state.recipe.get("data.chat_template"))}:  # the tool would render it without limits
        raise NotCompared("the recipe does not have the config's chat_template_jinja")
    try:
        tool = _axolotl if state.tool == "axolotl" else _llamafactory
        read = tool(state.given, copy.deepcopy(tokenizer), limit)
    except TOOL_ERRORS as error:
        raise NotCompared(f"{state.tool} does not open its config: {first_line(error)}") from error

    def reader(example: Example, row: Row) -> Tokens:
        try:
            return read(example, row)
        except TOOL_ERRORS as error:
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
    if kind not in AXOLOTL_TYPES:  # axolotl imports a module of this name
        raise NotCompared(f"finetune does not compare axolotl's type {visible(kind)}")
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
