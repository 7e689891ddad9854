"""Read examples during training, for data that does not fit on disk a second time.

Files are divided into shards: ranges of lines of a JSONL file, or whole other files. One rank and one of its
data loader workers read each shard, so each example is used once. Each block of examples is shuffled and
packed with its own seed. The order depends on nothing else, so `state_dict` of the dataset resumes it
exactly.
"""

from __future__ import annotations

import hashlib
import os
import random
from functools import partial
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.paths import refuse_lfs_pointer
from finetune.data import read_limits, readers, source_loading
from finetune.data.audit import Audit
from finetune.data.encoding import encoders
from finetune.data.examples import BadRow, Row
from finetune.data.loss_mask import IGNORED, WEIGHTS
from finetune.data.packing import best_fit
from finetune.data.preparation import Prepared, audit_held_out, audited
from finetune.data.read_limits import Limits, limited_lines
from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from datasets import IterableDataset
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from finetune.data.encoding import Encoded
    from finetune.recipe.schema import Data

RANGES = 64  # shards of one JSONL file, distributed over ranks and their workers
WORKERS = 64  # slots of the shared counters, one for each data loader worker
BLOCK = 2**20  # bytes hashed at each end of a file
RAW = ["value", "bad", "source"]  # columns that encoding replaces
AUDITED = 10_000  # examples checked before training; later examples are checked when they are read

Shard = tuple[str, int, int, Limits]  # path, first byte and end byte (for JSONL), limits


def stream(
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    vocabulary: int | None,
    declared: Collection[int] = (),
    passes: int | None = None,
) -> Prepared:
    """Return the training data as an iterable dataset, with an audit of its first and validation examples.

    Args:
        declared: ids that the model's generation config declares as the end of an answer.
        passes: number of epochs. `None` repeats the data without end. Ranks can have different numbers of
            examples, and a rank that finishes first would block the others.

    Raises:
        UserError: a setting needs all examples, or examples cannot be trained on (exit 2).
    """
    import torch
    from datasets import IterableDataset

    check(data)
    encoder_for = encoders(tokenizer, data, declared)
    held, audit = (Audit(encoder_for, data.train_on, vocabulary) for _ in range(2))
    states = source_loading.file_states(data)
    held_places = audit_held_out(data, set(), seed, held)
    shards = _shards(data, seed)
    places = []
    for shard in dict.fromkeys(shards):
        if audit.report.rows >= AUDITED:
            break
        rows = islice(_read(shard), AUDITED - audit.report.rows)
        for row, documents in audited(rows, data, audit, shard[0]):
            places += [row.where] * len(documents)
    report = audit.finish(places.__getitem__, held)
    audit.check(data, held.report.kept)
    report.sources = source_loading.fingerprints(data, held_out=True)
    paths = {path: Path(path) for path, *_ in shards}
    report.sources |= {
        name: f"streamed, {path.stat().st_size:,} bytes, {_ends(path)}" for name, path in paths.items()
    }
    source_loading.check_unchanged(states, source_loading.file_states(data))
    report.passed_by = source_loading.passed_by(data)
    report.folders = source_loading.notes_on_folders(data)
    report.seen = AUDITED if report.rows == AUDITED else 0

    rows = IterableDataset.from_generator(_generate, gen_kwargs={"shards": shards, "states": states})
    read = torch.zeros(WORKERS, 2, dtype=torch.int64).share_memory_()
    block = partial(
        encode_block,
        read=read,
        data=data,
        tokenizer=tokenizer,
        settings=BlockSettings(seed, vocabulary, declared, has_weights=report.loss_weight > 0),
    )
    options: dict[str, Any] = {"batch_size": data.shuffle_buffer, "remove_columns": RAW}
    check_shares(rows, block, launch_environment.processes())
    read.zero_()
    train: Any = rows.map(block, batched=True, **options).repeat(passes)
    content = [shards, sorted(report.sources.items())]  # identified by name, size and hash of both ends
    reports = {"train": report, "validation": held.finish(held_places.__getitem__)}
    return Prepared(train, reports, None, False, content, read)


def check_shares(rows: IterableDataset, block: Callable[..., Any], ranks: int) -> None:
    """Check that each rank has an example to train on. A rank without examples would block the others.

    Args:
        rows: all shards before encoding. Ranks share them as Accelerate does.
        block: the function that encodes them.

    Raises:
        UserError: a rank has no example (exit 2).
    """
    # With fewer shards than ranks, every rank reads all examples
    for index in range(ranks if rows.n_shards >= ranks > 1 else 0):
        own = rows.shard(ranks, index)
        encoded = own.map(block, batched=True, batch_size=1, remove_columns=RAW)
        if next(iter(encoded), None) is None:
            raise UserError(
                Problem(
                    f"process {index} of {ranks} gets no example to train on",
                    "data.name",
                    fix="data.streaming: false, or start fewer processes",
                    code="data-empty",
                )
            )


def check(data: Data) -> None:
    """Raise a UserError for settings that streaming does not support, before anything is read (exit 2)."""
    problems = []
    if data.validation_fraction is not None:
        problems.append(
            Problem(
                "this key excludes `data.streaming: true`",
                "data.validation_fraction",
                found=f"{data.validation_fraction:g}",
                fix="data.validation: <a file>, or data.streaming: false",
                why="the number of examples is not known",
                code="recipe-conflict",
            )
        )
    for source in source_loading.sources(data):
        if source.weight % 1:
            problems.append(
                Problem(
                    "streaming needs weights that are integers",
                    "data.name",
                    found=f"weight {source.weight:g}",
                    fix=f"weight: {max(1, round(source.weight))}",
                    code="recipe-conflict",
                )
            )
        if source_loading.files_of(source, "data.name") is None:
            problems.append(
                Problem(
                    "finetune can't stream datasets of the Hub",
                    "data.name",
                    found=source.name,
                    fix="data.streaming: false",
                    code="recipe-conflict",
                )
            )
    raise_if_any(problems)


class BlockSettings(NamedTuple):
    """Settings of the encoding of a block, besides the recipe's section."""

    seed: int
    vocabulary: int | None
    """Rows of the embedding. Every id must be lower."""
    declared: Collection[int]
    """Ids that the model's generation config declares as the end of an answer."""
    has_weights: bool
    """Whether sequences have a column for weights of the loss. All sequences need the same columns."""


def encode_block(
    batch: dict[str, list[Any]],
    read: Tensor,
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    settings: BlockSettings,
) -> dict[str, list[Any]]:
    """Encode a block of examples, shuffle it, and pack it if the recipe says so.

    Examples that are too long or have no token to train on are skipped.

    Args:
        read: shared counts [workers, 2]. The function adds the numbers of read and skipped examples.

    Raises:
        UserError: an example cannot be read or trained on, and `data.expect` does not allow it. An example
            has weights of the loss, and the first examples have none (exit 2).
    """
    from torch.utils.data import get_worker_info

    if worker := get_worker_info():
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads do not exist after the fork
    audit = Audit(encoders(tokenizer, data, settings.declared), data.train_on, settings.vocabulary)
    documents: list[tuple[str, Encoded]] = []
    given = zip(batch["source"], batch["value"], batch["bad"], batch["where"], strict=True)
    for source, rows in groupby(given, key=itemgetter(0)):
        for row, found in audited((_row(*row) for _, *row in rows), data, audit, source):
            documents += [(row.where, document) for document in found]
    audit.check_rows(data)
    if not settings.has_weights:
        refuse_weights(documents)
    own = read[worker.id % WORKERS if worker else 0]
    own += own.new_tensor([audit.report.rows, audit.report.dropped])
    random.Random(f"{settings.seed} {batch['where'][0]}").shuffle(documents)
    groups = [[index] for index in range(len(documents))]
    if data.packing:
        groups = best_fit([len(document.ids) for _, document in documents], data.max_length)
        random.Random(f"{settings.seed} {batch['where'][0]}").shuffle(groups)
    packed = [[documents[index] for index in group] for group in groups]
    columns: dict[str, list[Any]] = {
        "input_ids": [[i for _, one in group for i in one.ids] for group in packed],
        "labels": [[i for _, one in group for i in [IGNORED, *one.labels()[1:]]] for group in packed],
        "where": [[where for where, _ in group] for group in packed],
        "cut": [[one.cut for _, one in group] for group in packed],
    }
    if settings.has_weights:
        columns[WEIGHTS] = [[w for _, one in group for w in one.token_weights()] for group in packed]
    if data.packing:
        columns["seq_lengths"] = [[len(one.ids) for _, one in group] for group in packed]
    return columns


def refuse_weights(documents: list[tuple[str, Encoded]]) -> None:
    """Raise a UserError if a document of a stream has weights of the loss (exit 2)."""
    where = next((where for where, document in documents if document.weights), "")
    if where:
        raise UserError(
            Problem(
                "this example has weights of the loss, and the first examples of the stream have none",
                "data.streaming",
                where=where,
                fix=(
                    "data.streaming: false, or move an example with a weight between 0 and 1 to the beginning"
                ),
                why=f"finetune decides by the first {AUDITED:,} examples whether it reads weights",
                code="data-example",
            )
        )


def _shards(data: Data, seed: int) -> list[Shard]:
    """Return all shards of all sources, each as often as the weight of its source, shuffled."""
    found: list[Shard] = []
    for source in source_loading.sources(data):
        for path in source_loading.files_of(source, "data.name") or ():
            size = path.stat().st_size
            cuts = [size * i // RANGES for i in range(RANGES + 1)] if path.suffix == ".jsonl" else [0, size]
            ranges = [(a, b) for a, b in pairwise(cuts) if a < b]
            found += [(str(path), a, b, read_limits.of_source(source)) for a, b in ranges] * int(
                source.weight
            )
    random.Random(seed).shuffle(found)
    return found


def _ends(path: Path) -> str:
    """Return a hash of both ends of a file. Hashing all of a streamed file would take too long."""
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(BLOCK))
        file.seek(max(0, path.stat().st_size - BLOCK))
        digest.update(file.read(BLOCK))
    return f"sha256 of the first and last MiB {digest.hexdigest()[:16]}"


def _generate(shards: list[Shard], states: dict[str, source_loading.State]) -> Iterator[dict[str, Any]]:
    """Yield the rows of shards as columns. Files must keep their size and modification time."""
    for shard in shards:
        path, state = shard[0], states.get(shard[0], source_loading.NO_STATE)  # a new file has no state
        source_loading.check_unchanged({path: state}, {path: source_loading.state_of(path)})
        for row in _read(shard):
            if isinstance(row, BadRow):
                said = row.problem
                value, bad, where = {}, [said.what, said.found, said.fix], said.where
            else:
                value, bad, where = row.value, [], row.where
            yield {"value": value, "bad": bad, "where": where, "source": path}
        source_loading.check_unchanged({path: state}, {path: source_loading.state_of(path)})


def _row(value: dict[str, Any], bad: list[str], where: str) -> Row | BadRow:
    """Restore the row that `_generate` split into columns."""
    if not bad:
        return Row(value, where)
    what, found, fix = bad
    return BadRow("unreadable", what, where, found, fix=fix)


def _read(shard: Shard) -> Iterator[Row | BadRow]:
    name, start, end, limits = shard
    path = Path(name)
    if path.suffix == ".jsonl":
        yield from _lines(path, start, end, limits)
    else:
        yield from readers.read_file(path, limits)


def _lines(path: Path, start: int, end: int, limits: Limits) -> Iterator[Row | BadRow]:
    """Yield the rows of the lines that begin in the byte range [start, end)."""
    refuse_lfs_pointer(path)
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            next(
                limited_lines(file, path, limits), None
            )  # a line that begins before the range belongs to the previous range
        lines = limited_lines(file, path, limits)
        while (position := file.tell()) < end and (line := next(lines, b"")):
            for row in readers.json_lines([line], path, first=1 if position == 0 else 2):
                where = f"{path}, byte {position}"
                yield (
                    Row(row.value, where)
                    if isinstance(row, Row)
                    else BadRow(row.kind, row.problem.what, where, row.problem.found, fix=row.problem.fix)
                )
