"""Estimate a recipe's data before it is prepared: how many examples it has, and how long they are."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from finetune.autoconfig.batch_size import Batch, count_steps
from finetune.core import regular_files, untrusted_files
from finetune.core.errors import UserError
from finetune.core.verified_files import Damaged
from finetune.data import chat_templates, example_errors, prepared_cache, source_loading
from finetune.data.examples import BadRow, Example
from finetune.data.readers import count_rows, read_file
from finetune.data.template_sandbox import ChatTemplate, render
from finetune.models import tokenizer_setup
from finetune.models.model_files import file_on_disk, tokenizer_files
from finetune.recipe.schema import Data, Model, Train


class DataEstimate(NamedTuple):
    """An estimate of the data. A row is one example, or with packing one packed sequence."""

    number: int
    """Rows that a run trains on."""
    tokens: float
    """Mean tokens of a row."""
    padded: float
    """Mean tokens of a row after padding to the longest row of its micro-batch."""
    attended: float
    """Mean length of a document, weighted by its tokens. A token attends to half of it on average."""
    long: float = 0.0
    """Share of the examples that are longer than `data.max_length`."""
    split: float = 0.0
    """Share of the examples that are longer and that `data.too_long: split` splits."""
    how: str = ""
    """How the lengths are known."""


def rows_of(data: Data, model: Model, at_once: int, seed: int | None = None) -> DataEstimate | None:
    """Estimate the data from prepared data, or else from a sample of local files.

    Args:
        at_once: micro-batch size. Rows are padded to the longest row of their micro-batch.
        seed: the recipe's seed, which identifies prepared data. `None` ignores prepared data.

    Returns:
        The estimate; `None` if the data is streamed or is not on this machine.
    """
    if data.streaming:
        return None
    prepared, unused = _prepared(data, model, seed)
    if prepared:
        return _prepared_rows(prepared, data.packing, at_once, apart=not data.padding_free)
    rows = _sampled_rows(data, model, at_once, seed or 0)
    return rows._replace(how=f"{rows.how}; {unused}") if rows and unused else rows


def _prepared(data: Data, model: Model, seed: int | None) -> tuple[Path | None, str]:
    """Return the folder of a recipe's prepared data if it verifies, or `None` and why it can't be used."""
    if seed is None:
        return None, ""
    try:
        folder = prepared_cache.recall(data, seed, model, tokenizer_files(model))
        return (folder if folder and prepared_cache.reports(folder) else None), ""
    except Damaged as damage:
        return None, f"the plan ignores the prepared data, because {damage}; train prepares it again"
    except UserError as error:  # the folder belongs to another user
        return None, f"the plan ignores the prepared data, because {error.problems[0].what}"


def _sampled_rows(data: Data, model: Model, at_once: int, seed: int) -> DataEstimate | None:
    """Count the rows of local files and estimate their tokens from a sample.

    Returns:
        The estimate; `None` if a source is not a local file.
    """
    every = dict[Path, float]()
    shared = 1.0
    for source in source_loading.sources(data):
        paths = source_loading.files_of(source, "data.name")
        if not paths:
            return None
        for path in paths:
            stat = path.stat()
            every[path] = _count(path, stat.st_mtime_ns, stat.st_size) * source.weight
        shared = min(shared, 1 / max(1.0, source.weight))
    lines = sum(map(round, every.values()))
    # Each file contributes the same share of its rows to the sample.
    share = min(shared, SAMPLED / max(1.0, *every.values()))
    sampled = {path: max(1, round(own * share)) for path, own in every.items()}
    if data.validation_fraction is not None:
        lines -= _held_out(stamped(every), data.model_dump_json(), seed, lines)
    most = float(data.max_length)
    lengths, how = lengths_in_tokens(data, model, sampled)
    if not lengths:
        return DataEstimate(0, most, most, most, how="the files are empty")
    texts = can_be_split(data, sampled) if data.too_long == "split" else [False] * len(lengths)
    long = sum(length > most for length in lengths) / len(lengths)
    split = sum(text and length > most for length, text in zip(lengths, texts, strict=True)) / len(lengths)
    kept = used(lengths, data, texts)
    if not kept or lines <= 0:
        return DataEstimate(0, most, most, most, long, split, how)
    attended = sum(length**2 for length in kept) / sum(kept)
    rows = lines * len(kept) / len(lengths)
    if data.packing:
        rows *= sum(kept) / len(kept) / most
        return DataEstimate(max(1, round(rows)), most, most, attended, long, split, how)
    if len(every) > 1:
        random.Random(0).shuffle(kept)  # a batch has rows of all files
    batches = [kept[start : start + at_once] for start in range(0, len(kept), at_once)]
    padded = kept if data.padding_free else [max(batch) for batch in batches]
    mean, longest = sum(kept) / len(kept), sum(padded) / len(padded)
    spans = attended if data.padding_free else longest
    return DataEstimate(max(1, round(rows)), mean, longest, spans, long, split, how)


def used(lengths: list[float], data: Data, texts: list[bool]) -> list[float]:
    """Return the lengths that remain after `data.too_long` is applied to rows of these lengths.

    Prompts are assumed to be long enough for `truncate_prompt`.

    Args:
        texts: whether each row is plain text, which `split` splits.
    """
    most, pieces = float(data.max_length), list[float]()
    if data.too_long == "truncate_prompt":
        return [min(length, most) for length in lengths if length > 1]
    for length, text in zip(lengths, texts, strict=True):
        pieces += [most] * int(length // most) + [length % most] if text else [length]
    return [piece for piece in pieces if 1 < piece <= most]


def too_long(rows: DataEstimate | None, data: Data) -> tuple[str, bool]:
    """Describe how a run treats rows longer than `data.max_length`. Also return whether a run would stop."""
    if rows is None or not rows.long:
        return "", False
    share = f"{rows.long:.0%} of the examples are longer than data.max_length ({data.max_length})"
    if rows.split == rows.long:
        return f"{share}, and finetune splits them", False
    if data.too_long == "truncate_prompt":
        return f"{share}; finetune truncates their prompts, and drops examples that are still too long", False
    if data.too_long == "error":
        return f"{share}, and data.too_long is error", True
    limit, dropped, what = data.expect.dropped, rows.long - rows.split, "and finetune drops them"
    if data.too_long == "split":
        what = f"and finetune drops {dropped:.0%}, because it splits only plain text"
    return f"{share}, {what}; data.expect.dropped allows {limit:.0%}", dropped > limit


def refused(rows: DataEstimate | None, data: Data, batch: Batch) -> str:
    """Return why a run would refuse the rows; the empty string if no reason is known."""
    if rows is None:
        return ""
    paths = [
        path
        for source, key in source_loading.named(data)
        for path in source_loading.files_of(source, key) or ()
    ]
    if not rows.number and data.validation_fraction is not None:
        return (
            f"no example would be left for training (data.validation_fraction: {data.validation_fraction:g})"
        )
    if why := _unusable(stamped(paths), data.model_dump_json()):
        return why
    long, refuses = too_long(rows, data)
    if refuses or rows.number >= batch.effective:
        return long if refuses else ""
    if not rows.number:
        return "there is no example to train on"
    number = f"{rows.number:,} sequence{'s' * (rows.number > 1)}"
    return f"the data has {number}, and one step needs {batch.effective} (train.effective_batch_size)"


def known_steps(train: Train, rows: DataEstimate | None, batch: Batch, processes: int) -> int | None:
    """Return the optimizer steps of the run; `None` if they are not known before the data is prepared."""
    if train.max_steps is not None:
        return train.max_steps
    if rows is None or rows.number < batch.effective:
        return None
    return count_steps(train, rows.number, batch, processes)


@cache  # a plan and each of its suggestions call it
def _unusable(paths: tuple[tuple[str, int], ...], requested: str) -> str:
    """Return why a run would refuse the first rows; else the empty string."""
    try:
        example_errors.first_rows(Data.model_validate_json(requested))  # `refused` checks their number
    except UserError as error:
        first = error.problems[0]
        return f"{first.what} ({first.where or first.key}); `finetune check` shows all problems"
    return ""


@cache  # a plan and each of its suggestions call it
def _prepared_rows(folder: Path, packing: bool, at_once: int, *, apart: bool) -> DataEstimate:
    """Return the exact number and lengths of prepared rows.

    Args:
        apart: whether rows are padded to the longest row of their micro-batch.
    """
    import numpy as np
    import pyarrow

    name = "seq_lengths" if packing else "input_ids"
    lengths, documents = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with pyarrow.memory_map(str(folder / prepared_cache.ROWS)) as content:
        for batch in pyarrow.ipc.open_stream(content):
            lengths.append(np.diff(batch.column("input_ids").offsets.to_numpy()))
            documents.append(batch.column(name).flatten().to_numpy() if packing else lengths[-1])
    rows, inner = np.concatenate(lengths).astype(float), np.concatenate(documents).astype(float)
    attended = float((inner**2).sum() / inner.sum())
    longest = float(rows.mean())
    if apart and not packing:
        mixed = np.random.default_rng(0).permutation(rows)
        longest = float(np.mean([mixed[i : i + at_once].max() for i in range(0, len(mixed), at_once)]))
    report = (prepared_cache.reports(folder) or {})["train"]
    long = report["counts"].get("too_long", 0) / max(1, report["rows"])
    spans = attended if packing or not apart else longest
    return DataEstimate(len(rows), float(rows.mean()), longest, spans, long, how="prepared data")


@cache  # a plan and each of its suggestions call it
def _count(path: Path, changed: int, size: int) -> int:
    """Count the rows of a file. A file that cannot be read has 0 rows, and `refused` reports the error."""
    if path.suffix != ".jsonl":
        with contextlib.suppress(UserError):
            return count_rows(path)
        return 0
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")  # the last line may lack a newline


@cache  # a plan and each of its suggestions call it
def _held_out(paths: tuple[tuple[str, int], ...], requested: str, seed: int, rows: int) -> int:
    """Return the size of the validation set that `data.validation_fraction` takes.

    The number is exact for up to `DRAWN` rows whose sources all have weight 1. Else it is an estimate.
    """
    data = Data.model_validate_json(requested)
    about = source_loading.count_held_out(rows, data.validation_fraction or 0)
    if rows > DRAWN or any(source.weight != 1 for source in source_loading.sources(data)):
        return about
    try:
        drawn = source_loading.draw_held_out(data, seed)
        return sum(1 for _, found in source_loading.validation(data, drawn, seed) for _ in found)
    except UserError:  # `refused` reports the error
        return about


# Characters per token, for text that is not tokenized here.
CHARACTERS = 4
# Rows sampled from the largest file.
SAMPLED = 500
# Up to this number of rows, the validation set is drawn as in a run. Above, its size is estimated.
DRAWN = 10_000
# Characters that are tokenized, in about one second.
TOKENIZED = 10**6
# Keys of `data:` that decide how an example is read.
READ = {"format", "columns", "role_map", "reasoning", "train_on"}
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


def lengths_in_tokens(data: Data, model: Model, sampled: Mapping[Path, int]) -> tuple[list[float], str]:
    """Return the tokens of each sampled row, and how they are known.

    Args:
        sampled: the number of rows to read from the start of each file.
    """
    folder = file_on_disk(model, "tokenizer.json")
    template = chat_templates.read_template(data.chat_template) if data.chat_template else _template(model)
    settings = data.model_dump_json(include=READ)
    config = str(file_on_disk(model, "tokenizer_config.json") or "")
    return _lengths(stamped(sampled), (*sampled.values(),), settings, str(folder or ""), config, template)


def stamped(paths: Iterable[Path]) -> tuple[tuple[str, int], ...]:
    """Return files with their modification times, so that a cached result expires when a file changes."""
    return tuple((str(path), path.stat().st_mtime_ns) for path in paths)


def can_be_split(data: Data, sampled: Mapping[Path, int]) -> list[bool]:
    """Return for each sampled row whether `data.too_long: split` splits it. It splits only plain text."""
    rows = _rows(stamped(sampled), (*sampled.values(),), data.model_dump_json(include=READ))
    return [isinstance(row, Example) and not row.messages and row.prompt is None for row in rows]


@cache
def _rows(
    paths: tuple[tuple[str, int], ...], counts: tuple[int, ...], requested: str
) -> list[Example | BadRow]:
    """Read the first rows of each file."""
    data, rows = Data.model_validate({"name": "-", **json.loads(requested)}), list[Example | BadRow]()
    for (path, _), count in zip(paths, counts, strict=True):
        with contextlib.suppress(UserError):  # `refused` reports the error
            first = islice(read_file(Path(path)), count)
            rows += source_loading.examples(first, data, path, {}, {})
    return rows


@cache  # a plan and each of its suggestions call it
def _lengths(
    paths: tuple[tuple[str, int], ...],
    counts: tuple[int, ...],
    requested: str,
    tokenizer: str,
    config: str,
    template: str,
) -> tuple[list[float], str]:
    rows = _rows(paths, counts, requested)
    sizes = list(map(_characters, rows))
    if not tokenizer:
        why = "the model's tokenizer is not on this machine"
        return [size / CHARACTERS for size in sizes], f"{CHARACTERS} characters per token, because {why}"
    chosen, characters = list[tuple[int, Example]](), 0
    for index, (size, example) in enumerate(zip(sizes, rows, strict=True)):
        if isinstance(example, Example) and characters + size <= TOKENIZED:
            chosen.append((index, example))
            characters += size
    found = _tokens([example for _, example in chosen], tokenizer, config, template)
    if not found or not any(found):
        why = "there is no chat template" if found is None else "no example can be tokenized here"
        return [size / CHARACTERS for size in sizes], f"{CHARACTERS} characters per token, because {why}"
    each = sum(found) / max(1, characters)
    known = {index: float(tokens) for (index, _), tokens in zip(chosen, found, strict=True) if tokens}
    made = [known.get(index, size * each) for index, size in enumerate(sizes)]
    return made, f"by the model's tokenizer and template, from {len(known)} examples"


def _tokens(examples: list[Example], tokenizer: str, config: str, template: str) -> list[int] | None:
    """Count the tokens of each example, 0 if its chat can't be rendered.

    Returns:
        The counts; `None` if there are chats and no chat template.
    """
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    regular_files.check_regular(path, "model.name", regular_files.limit_of(path))
    backend = Tokenizer.from_file(tokenizer)
    tokenizer_setup.check_backend(backend, tokenizer)
    chats = [(example.messages, example.tools) for example in examples if example.messages]
    if chats and not template:
        return None
    with_turns = chat_templates.marked_twin(template) or template
    rendered = iter(render(ChatTemplate(with_turns, _special(config)), chats) if chats else [])
    found = []
    for example in examples:  # plain text gets an EOS token; a chat template writes its own
        plain = not example.messages
        text = (example.prompt or "") + example.completion if plain else next(rendered).text
        found.append(len(backend.encode(text, add_special_tokens=plain).ids) + plain)
    return found


def _characters(part: object) -> int:
    """Count the characters of an example, or of a part of it. A row that can't be read has none."""
    if isinstance(part, str):
        return len(part)
    if isinstance(part, Example):
        part = [part.messages, part.tools, part.prompt, part.completion]
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return sum(map(_characters, inner))


def _special(config: str) -> dict[str, str]:
    """Return the tokenizer's special tokens, which chat templates use by name."""
    held = untrusted_files.read_object(Path(config), "model.name") if config else {}
    found = {name: held.get(name) for name in SPECIAL}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template(model: Model) -> str:
    """Return the model's own chat template; the empty string if it is not on this machine."""
    if path := file_on_disk(model, "chat_template.jinja"):
        return regular_files.read_text(path)
    path = file_on_disk(model, "tokenizer_config.json")
    said = untrusted_files.read_object(path, "model.name").get("chat_template") if path else None
    return said if isinstance(said, str) else ""
