"""Tokens of rows before they are prepared: by the model's tokenizer and chat template where they are here.

transformers takes seconds to open a tokenizer, so tokenizer.json is read by `tokenizers` alone; templates are
rendered as for training, in a process of their own.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data import bundled, load
from finetune.data.readers import json_lines
from finetune.data.render import render
from finetune.data.rows import BadRow, Example
from finetune.sections import Data

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from finetune.sections import Model

CHARACTERS = 4  # of a token, in text that is not tokenised here
SAMPLED = 500  # rows of the largest file
TOKENISED = 10**6  # characters, which take about a second
READ = {"format", "columns", "role_map", "reasoning", "train_on"}  # of `data:`, what decides on an example
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def lengths(data: Data, model: Model, sampled: Mapping[Path, int]) -> tuple[list[float], str]:
    """Tokens of so many first rows of each jsonl file, and how they are known."""
    folder = _file(model, "tokenizer.json")
    template = bundled.read_template(data.chat_template) if data.chat_template else _template(model)
    asked = data.model_dump_json(include=READ)
    config = str(_file(model, "tokenizer_config.json") or "")
    return _lengths(stamped(sampled), (*sampled.values(),), asked, str(folder or ""), config, template)


def stamped(paths: Iterable[Path]) -> tuple[tuple[str, int], ...]:
    """Files, and when they were changed: what is kept of them holds as long."""
    return tuple((str(path), path.stat().st_mtime_ns) for path in paths)


def split(data: Data, sampled: Mapping[Path, int]) -> list[bool]:
    """Of the same rows, which ones `data.too_long: split` cuts in pieces: plain text, as in a run."""
    rows = _rows(stamped(sampled), (*sampled.values(),), data.model_dump_json(include=READ))
    return [isinstance(row, Example) and not row.messages and row.prompt is None for row in rows]


@cache
def _rows(paths: tuple[tuple[str, int], ...], counts: tuple[int, ...], asked: str) -> list[Example | BadRow]:
    """The first rows of each file."""
    data, rows = Data.model_validate({"name": "-", **json.loads(asked)}), list[Example | BadRow]()
    for (path, _), count in zip(paths, counts, strict=True):
        with open(path, "rb") as file:
            rows += load.examples(json_lines(islice(file, count), Path(path)), data, path, {}, {})
    return rows


@cache  # a plan asks for each change it tries
def _lengths(
    paths: tuple[tuple[str, int], ...],
    counts: tuple[int, ...],
    asked: str,
    tokenizer: str,
    config: str,
    template: str,
) -> tuple[list[float], str]:
    rows = _rows(paths, counts, asked)
    sizes = list(map(_characters, rows))
    if not tokenizer:
        why = "the model's tokenizer is not here"
        return [size / CHARACTERS for size in sizes], f"{CHARACTERS} characters a token, for {why}"
    chosen, characters = list[tuple[int, Example]](), 0
    for index, (size, example) in enumerate(zip(sizes, rows, strict=True)):
        if isinstance(example, Example) and characters + size <= TOKENISED:
            chosen.append((index, example))
            characters += size
    found = _tokens([example for _, example in chosen], tokenizer, config, template)
    if not found or not any(found):
        why = "there is no chat template" if found is None else "no row can be tokenised here"
        return [size / CHARACTERS for size in sizes], f"{CHARACTERS} characters a token, for {why}"
    each = sum(found) / max(1, characters)
    known = {index: float(tokens) for (index, _), tokens in zip(chosen, found, strict=True) if tokens}
    made = [known.get(index, size * each) for index, size in enumerate(sizes)]
    return made, f"by the model's tokenizer and template, from {len(known)} of them"


def _tokens(examples: list[Example], tokenizer: str, config: str, template: str) -> list[int] | None:
    """Of each example, 0 where its chat can't be rendered; `None` if there are chats and no template."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(tokenizer)
    backend.no_truncation()
    backend.no_padding()
    chats = [(example.messages, example.tools) for example in examples if example.messages]
    if chats and not template:
        return None
    with_turns = bundled.marked_twin(template) or template
    rendered = iter(render(with_turns, _special(config), "none", chats) if chats else [])
    found = []
    for example in examples:  # a text is closed by the eos token; of a chat the template writes it
        plain = not example.messages
        text = (example.prompt or "") + example.completion if plain else next(rendered).text
        found.append(len(backend.encode(text, add_special_tokens=plain).ids) + plain)
    return found


def _characters(part: Any) -> int:
    """Of all texts in an example, or in a part of one; what can't be trained on has none."""
    if isinstance(part, str):
        return len(part)
    if isinstance(part, Example):
        part = [part.messages, part.tools, part.prompt, part.completion]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return sum(map(_characters, inner))


def _special(config: str) -> dict[str, str]:
    """The tokenizer's special tokens, which templates name."""
    held = json.loads(Path(config).read_text(encoding="utf-8")) if config else {}
    found = {name: held.get(name) for name in SPECIAL}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template(model: Model) -> str:
    """The model's own chat template, if it is here."""
    if path := _file(model, "chat_template.jinja"):
        return path.read_text(encoding="utf-8")
    path = _file(model, "tokenizer_config.json")
    said = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path else None
    return said if isinstance(said, str) else ""


def _file(model: Model, name: str) -> Path | None:
    """A file of a model that is on this machine: in its folder, or in the Hub's cache."""
    folder = Path(model.name)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model.name, name, revision=model.revision)
    except HFValidationError:  # a path where nothing is
        return None
    return Path(found) if isinstance(found, str) else None
