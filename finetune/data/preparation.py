"""Prepare the training data of a run: read, render, encode, audit, pack and cache.

One pass processes a few thousand examples at a time, and keeps only a few numbers per document in memory. The
result is a memory-mapped file. The cache reuses it for the same files, file names, tokenizer, template and
recipe section.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import hashlib
import json
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from finetune.core import progress
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.verified_files import Damaged
from finetune.data import chat_templates, prepared_cache, source_loading, source_weights
from finetune.data.audit import Audit, Report
from finetune.data.encoding import Encoded, encoders
from finetune.data.examples import BadRow, Example, Row
from finetune.data.first_rows import FirstRows
from finetune.data.packing import best_fit
from finetune.data.prepared_cache import cache_folder, code_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.encoding import Encoder
    from finetune.recipe.schema import Data, Source

CHUNK, CHARACTERS = 4000, 2_000_000  # limits of examples and characters that are encoded together


@dataclass(frozen=True)
class Prepared:
    """The prepared training data and its reports.

    A sequence has `input_ids` and `labels`, and `seq_lengths` if it is packed. `where` holds the origin of
    each document, and `cut` the number of tokens removed from its prompts.

    The validation set has only a report. Evaluations encode it again (`held_out`).
    """

    train: Any  # Dataset, or IterableDataset if examples are read during training
    report: dict[str, Report]  # train, validation
    path: Path | None  # in the cache; `None` if streamed
    cached: bool
    content: list[Any]
    """The values that determine the sequences and their order: weights and content hashes."""
    read: Any = None
    """For streamed data: shared counts of read and skipped examples, an int64 tensor [workers, 2]."""

    @property
    def rows(self) -> int | None:
        """The number of training sequences; `None`: they are read during training."""
        return len(self.train) if self.read is None else None


def prepare(
    data: Data,
    tokenizer: Any,
    seed: int,
    vocabulary: int | None,
    declared: Collection[int] = (),
) -> Prepared:
    """Prepare the data of a recipe, or load it from the cache.

    Args:
        data: the recipe's data section.
        tokenizer: the tokenizer with its chat template.
        seed: selects validation examples and fractional parts of sources.
        vocabulary: rows of the model's embedding. Every token id must be lower.
        declared: ids that the model's generation config declares as the end of an answer.

    Raises:
        UserError: more examples cannot be read or trained on than `data.expect` allows, or another program
            writes to the data meanwhile (exit 2).
    """
    from datasets import Dataset

    before = source_loading.file_states(data)
    sources = source_loading.fingerprints(data)
    content = [
        [_content(source, sources) for source in source_loading.sources(data)],
        sorted(sources.values()),
    ]
    folder = cache_folder(data) / _key(data, tokenizer, seed, [vocabulary, sorted(declared)], content)
    reports_by_split, note = _read_cached(folder)
    cached = reports_by_split is not None
    if reports_by_split is None:
        building = prepared_cache.start(folder.parent)
        # Preparation allocates millions of small lists without cycles, so garbage collection only costs time
        gc.disable()
        try:
            reports = _build(building, data, encoders(tokenizer, data, declared), seed, vocabulary)
            source_loading.check_unchanged(before, source_loading.file_states(data))
            prepared_cache.seal(building, folder.name, reports)
            prepared_cache.publish(building, folder)
        finally:
            gc.enable()
            shutil.rmtree(building, ignore_errors=True)
        reports_by_split = _read_back(folder)
    reports_by_split["train"] |= {
        "sources": sources,
        # Not cached, because other files in the folder can change
        "passed_by": source_loading.passed_by(data),
        "folders": source_loading.notes_on_folders(data),
    }
    train: Any = Dataset.from_file(str(folder / prepared_cache.ROWS))
    reports = {name: Report(**values) for name, values in reports_by_split.items()}
    reports["train"].notes += [note] if note else []
    return Prepared(train, reports, folder, cached, content)


def _read_cached(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the reports of cached data and a note. The reports are `None` if the data must be prepared."""
    try:
        found = prepared_cache.read(folder)
    except Damaged as damage:
        return None, f"the prepared data in {folder} was damaged: {damage}. finetune prepared it again"
    if found and (owner := prepared_cache.owner_of(folder)):
        return found, f"{owner} prepared the data in {folder}"
    return found, ""


def _read_back(folder: Path) -> dict[str, Any]:
    """Return the reports of data that was just prepared.

    Raises:
        UserError: the data does not verify, because of a disk or memory error (exit 3).
    """
    try:
        found = prepared_cache.read(folder)
    except Damaged as damage:
        found, why = None, str(damage)
    else:
        why = "the folder is gone"
    if found is None:
        raise UserError(
            Problem(
                "the cache can't read back the data that it stored",
                "data.cache_dir",
                where=str(folder),
                found=why,
                fix="set data.cache_dir to another disk",
                code="cache",
            ),
            code=Exit.ENVIRONMENT,
        )
    return found


def dated(data: Data, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Set today's date in the section if the chat template asks for the time, else remove the date.

    A date in the recipe stays if the template uses it.
    """
    templates: Any = tokenizer.chat_template or ""
    texts = templates.values() if isinstance(templates, dict) else [templates]
    asks = any(map(chat_templates.reads_clock, texts))
    date = (data.template_date or datetime.date.today().isoformat()) if asks else None
    return data.model_copy(update={"template_date": date})


class HeldOut(NamedTuple):
    """A validation example and its encoded documents."""

    example: Example
    documents: list[Encoded]

    def last_turn(self) -> list[int]:
        """Return the token ids of the last answer, including its end-of-turn token."""
        last = self.documents[-1]
        start, end = last.trained[-1]
        return last.ids[start:end]


def held_out(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    declared: Collection[int] = (),
    vocabulary: int | None = None,
) -> tuple[list[HeldOut], list[str]]:
    """Return the validation examples for evaluation, and notes on them.

    They pass the same checks as in training.

    Args:
        vocabulary: rows of the model's embedding. Every token id must be lower.

    Raises:
        UserError: a token id is outside the embedding, an example is malformed, or none is left (exit 2).
    """
    audit = Audit(encoders(tokenizer, data, declared), data.train_on, vocabulary)
    drawn = source_loading.draw_held_out(data, seed)
    rows = [HeldOut(*pair) for pair in audited_held_out(data, drawn, seed, audit)]
    audit.check_ids()
    audit.check_held_out(data)
    return rows, audit.report.remarks()


def encode_held_out(
    kept: Iterable[Example], data: Data, tokenizer: PreTrainedTokenizerBase, declared: Collection[int]
) -> list[HeldOut]:
    """Encode the validation examples that a run folder has stored."""
    encoder_for = encoders(tokenizer, data, declared)
    rows = []
    for example, encoded in encode(kept, encoder_for):
        documents = fit(encoded, example, data, encoder_for(bool(example.messages)))
        if not isinstance(documents, str):  # stored examples already fit `data.max_length`
            rows.append(HeldOut(example, documents))
    return rows


def audited_held_out(data: Data, drawn: set[int], seed: int, audit: Audit) -> Iterator[Any]:
    """Yield (example, encoded documents) of each usable validation example."""
    for name, rows in source_loading.validation(data, drawn, seed):
        yield from audited(rows, data, audit, name)


def audit_held_out(data: Data, drawn: set[int], seed: int, audit: Audit) -> list[str]:
    """Check that the validation set can be encoded, and that each prompt can be rendered (exit 2 if not).

    Returns:
        file:line of each document.
    """
    rows = list(audited_held_out(data, drawn, seed, audit))
    audit.check_held_out(data)
    measure_prompts([row for row, _ in rows], audit)
    return [row.where for row, documents in rows for _ in documents]


def measure_prompts(examples: list[Example], audit: Audit) -> None:
    """Record the number of tokens of the longest evaluation prompt.

    Raises:
        UserError: a prompt cannot be rendered, or has token ids outside the vocabulary (exit 2).
    """
    with_prompt = [example for example in examples if example.asks]
    if with_prompt:
        prompts = audit.encoder_for(any(example.messages for example in with_prompt)).prompts(with_prompt)
        audit.report.longest_prompt = max(map(len, prompts))
        for example, ids in zip(with_prompt, prompts, strict=True):
            audit.look_at_ids(ids, example.where)
        audit.check_ids()


def fit(encoded: Encoded, example: Example, data: Data, encoder: Encoder) -> list[Encoded] | str:
    """Apply `data.too_long` to an example. Return its documents, or the kind under which it is skipped."""
    limit = encoder.longest(data.max_length)
    if len(encoded.ids) > limit:
        if data.too_long == "split" and not example.messages and example.prompt is None:
            starts = range(0, len(encoded.ids), limit)
            pieces = [encoded.ids[start : start + limit] for start in starts]
            return [Encoded(ids, [(0, len(ids))]) for ids in pieces if len(ids) > 1]
        cuts = data.too_long == "truncate_prompt"
        shorter = encoder.shortened(example, encoded, limit) if cuts else None
        if shorter is None:
            return "too_long"
        encoded = shorter
    # No position predicts the first token
    trained = any(end > max(start, 1) for start, end in encoded.trained)
    return [encoded] if trained else "nothing_trained"


class First(NamedTuple):
    """The audits of the first examples of each source."""

    train: Audit
    validation: Audit
    is_all_validation: bool
    """Whether all validation examples were read."""
    sequences: int | None
    """Training sequences per epoch, or `None` if the data is streamed or was not read completely."""


def check_first(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    vocabulary: int,
    declared: Collection[int],
    most: int,
) -> First:
    """Check the first training and validation examples as `prepare` checks all examples.

    Args:
        most: maximum number of examples of each source.

    Raises:
        UserError: `prepare` would not accept the examples (exit 2).
    """
    encoder_for = encoders(tokenizer, data, declared)
    audit, held = (Audit(encoder_for, data.train_on, vocabulary) for _ in range(2))
    first = _first_rows(data, most)
    partial = {key for _, key, _, is_all in first if not is_all}
    drawn = source_loading.draw_held_out(data, seed) if not partial else set[int]()
    places, times, validation = list[str](), list[Any](), list[Any]()
    for source, key, rows, _ in first:
        name, before = source_loading.title(source), source_weights.counted_so_far(audit)
        sides = {True: list[Any](), False: list[Any]()}
        for row in rows:
            held_out = key == "data.validation" or source_loading.is_held_out(row, data, drawn, seed)
            sides[held_out].append(row)
        validation += audited(sides[True], data, held, name)
        for example, encoded in audited(sides[False], data, audit, name):
            places += [example.where] * len(encoded)
        times.append(source_weights.count(audit, source, name, before, seed))
    audit.finish(places.__getitem__, held)
    held.finish([example.where for example, encoded in validation for _ in encoded].__getitem__)
    is_all_validation = ("data.name" if data.validation is None else "data.validation") not in partial
    if is_all_validation:
        held.check_held_out(data)
    else:
        held.check_rows(data)
    measure_prompts([example for example, _ in validation], held)
    if partial:
        audit.check_rows(data)
        return First(audit, held, is_all_validation, None)
    audit.check(data, held.report.kept)
    source_weights.check(audit.report)
    number = None if data.streaming else len(sequences(data, audit, times).counts)
    return First(audit, held, is_all_validation, number)


def _first_rows(data: Data, most: int) -> list[tuple[Source, str, list[Any], bool]]:
    """Return each source with its key, its first rows, and whether these are all of its rows.

    A Hub dataset gives no rows.
    """
    found = []
    for source, key in source_loading.named(data):
        if source_loading.files_of(source, key) is None:
            found.append((source, key, [], False))
            continue
        rows = FirstRows(iter(source_loading.read(source, key)), most)
        found.append((source, key, list(rows), rows.are_all()))
    return found


class Sequences(NamedTuple):
    """The documents of each training sequence."""

    order: NDArray[np.int64]
    """Indices of the documents, sequence by sequence."""
    counts: NDArray[np.int64]
    """Number of documents in each sequence."""
    fill: float
    """Share of `data.max_length` that packed sequences use, or 1 without packing."""


def sequences(data: Data, audit: Audit, times: list[NDArray[np.int64]]) -> Sequences:
    """Return the training sequences of one epoch.

    Args:
        times: how often each document is used, one array per source.
    """
    order = np.repeat(np.arange(len(audit.lengths)), np.concatenate(times))
    if not data.packing:
        return Sequences(order, np.ones_like(order), 1.0)
    lengths = np.frombuffer(audit.lengths, np.int32)[order]
    rows = best_fit(lengths.tolist(), data.max_length)
    fill = float(lengths.sum()) / (len(rows) * data.max_length)
    return Sequences(order[np.concatenate(rows)], np.array([len(row) for row in rows]), fill)


def encode(found: Iterable[Any], encoder_for: Callable[[bool], Encoder]) -> Iterator[tuple[Any, Any]]:
    """Yield (example, tokens) or (bad row, None) in order.

    One thread renders a chunk while another thread tokenizes the previous chunk.

    Args:
        found: examples and bad rows.
        encoder_for: returns the encoder. Its argument is whether the chunk contains chats.
    """

    def render(chunk: list[Any]) -> tuple[Encoder, list[Example], Any]:
        good = [item for item in chunk if isinstance(item, Example)]
        encoder = encoder_for(any(example.messages for example in good))
        return encoder, good, encoder.render(good)

    def tokenize(job: Future[tuple[Encoder, list[Example], Any]]) -> list[Any]:
        encoder, good, texts = job.result()
        return encoder.tokenize(good, texts)

    found, under_way = iter(found), deque()
    with ThreadPoolExecutor(2) as pool:
        while (chunk := _chunk(found)) or under_way:
            if chunk:
                under_way.append((chunk, pool.submit(tokenize, pool.submit(render, chunk))))
            if not chunk or len(under_way) > 2:
                items, job = under_way.popleft()
                encoded = iter(job.result())
                yield from ((item, next(encoded) if isinstance(item, Example) else None) for item in items)


def _chunk(found: Iterator[Any]) -> list[Any]:
    """Return the next items: at most CHUNK, or fewer if they are long."""
    chunk, characters = [], 0
    for item in found:
        chunk.append(item)
        characters += item.characters() if isinstance(item, Example) else 0
        if len(chunk) == CHUNK or characters > CHARACTERS:
            break
    return chunk


def audited(rows: Iterable[Row | BadRow], data: Data, audit: Audit, name: str) -> Iterator[Any]:
    """Yield (example, encoded documents) of each row that is kept. The audit counts every row."""
    found = source_loading.examples(rows, data, name, audit.report.formats, audit.report.unused)
    found = progress.track(encode(found, audit.encoder_for), None, lambda _: 1, "examples")
    for example, encoded in found:
        audit.report.read[name] = audit.report.read.get(name, 0) + 1
        if isinstance(example, BadRow) or isinstance(encoded, BadRow):
            audit.bad(example if isinstance(example, BadRow) else encoded, name)
            continue
        format = audit.report.formats[name]
        audit.bad_rows.of_format(name, format, format, example.where)
        encoder = audit.encoder_for(bool(example.messages))
        documents = fit(encoded, example, data, encoder)
        if isinstance(documents, str):
            audit.left_out(documents, example.where, len(encoded.ids))
            audit.limited_to(encoder.longest(data.max_length), data.max_length)
        else:
            audit.keep(example, documents)
            yield example, documents


def _build(
    folder: Path,
    data: Data,
    encoder_for: Callable[[bool], Encoder],
    seed: int,
    vocabulary: int | None,
) -> dict[str, Any]:
    """Write rows.arrow and return the reports."""
    from finetune.data.arrow_store import Documents

    started = time.perf_counter()
    drawn = source_loading.draw_held_out(data, seed)
    held, audit = (Audit(encoder_for, data.train_on, vocabulary) for _ in range(2))
    held_places = audit_held_out(data, drawn, seed, held)
    documents = Documents(folder)
    times = []  # how often each document is used per epoch
    with contextlib.closing(documents):
        for source in source_loading.sources(data):
            name, before = source_loading.title(source), source_weights.counted_so_far(audit)
            for example, found in audited(
                source_loading.training(data, source, drawn, seed), data, audit, name
            ):
                for document in found:
                    documents.add(document, example.where)
            times.append(source_weights.count(audit, source, name, before, seed))
    report = audit.finish(documents.place, held)
    audit.check(data, held.report.kept)
    source_weights.check(report)
    report.notes += source_weights.notes(report)
    rows = report.rows - report.counts.get("unreadable", 0)
    report.notes += source_loading.note_on_share(data, rows + held.report.rows, held.report.rows)
    order, counts, fill = sequences(data, audit, times)
    if data.packing:
        report.packing = {"rows": len(counts), "budget": data.max_length, "fill": fill}
    documents.write_rows(folder / prepared_cache.ROWS, order, counts, data.packing)
    documents.remove()
    report.seconds = time.perf_counter() - started
    return {"train": report.as_json(), "validation": held.finish(held_places.__getitem__).as_json()}


def _key(data: Data, tokenizer: Any, seed: int, model: list[Any], content: list[Any]) -> str:
    """Return a hash of everything that the prepared data depends on. It names the cache folder.

    Args:
        model: the size of the vocabulary, and the tokens that end an answer.
        content: the weights and hashes of the sources in order, and all hashes.
    """
    random = data.validation_fraction is not None or any(s.weight % 1 for s in source_loading.sources(data))
    parts = {
        "data": data.model_dump(
            exclude={"cache_dir", "template_date", "max_example_bytes", "max_uncompressed_bytes"}
        ),  # includes the names of the files, because positions in the data contain them
        "date": dated(data, tokenizer).template_date,
        "mix": content[0],
        "sources": content[1],
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "special": tokenizer.special_tokens_map,
        "settings": _settings(tokenizer),
        "template": tokenizer.chat_template,
        "longest": tokenizer.model_max_length,
        "seed": seed if random else None,
        "model": model,
        "versions": [version("tokenizers"), version("transformers"), version("trl")],
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _settings(tokenizer: Any) -> list[Any]:
    """Return what tokenizer_config.json can change in an encoding beside tokenizer.json, without paths."""
    values = {name: value for name, value in tokenizer.init_kwargs.items() if isinstance(value, int | float)}
    return [type(tokenizer).__name__, tokenizer.backend_tokenizer.encode_special_tokens, values]


def _content(source: Source, sources: dict[str, str]) -> list[Any]:
    """Describe a source by its weight and its content hashes, without its name."""
    paths = source_loading.files_of(source, "data.name")
    found = (
        [sources[str(path.resolve())] for path in paths]
        if paths
        else [sources[source_loading.hub_name(source)]]
    )
    return [source.weight, found]
