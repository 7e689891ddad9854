"""What can be said of a recipe's rows before they are prepared: how many, how long, how many are too long."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from finetune import plan_tokens
from finetune.batch import count_steps
from finetune.data import bad_rows, load
from finetune.errors import UserError
from finetune.sections import Data

if TYPE_CHECKING:
    from finetune.batch import Batch
    from finetune.sections import Model, Train


class Rows(NamedTuple):
    """What can be said of the data without preparing it."""

    number: int
    tokens: float
    """Of a row, on average."""
    padded: float
    """Of a row as it is computed: as long as the longest of its batch."""
    attended: float
    """Of a document, weighted by its tokens: what a token's attention spans, half of it on average."""
    long: float = 0.0
    """Share of the rows that are longer than `data.max_length`."""
    split: float = 0.0
    """Share of the rows that are longer, and are cut in pieces."""
    how: str = ""
    """How their lengths are known."""


def rows_of(data: Data, model: Model, at_once: int) -> Rows | None:
    """Rows of local jsonl files, counted, and their tokens, from a sample; `None` for other data.

    Args:
        at_once: rows of a batch, which are as long as the longest of them.
    """
    every = dict[Path, float]()
    shared = 1.0
    if data.streaming:
        return None
    for source in load.sources(data):
        paths = load.files(source.name, "data.name")
        if not paths or any(path.suffix != ".jsonl" for path in paths):
            return None
        for path in paths:
            stat = path.stat()
            every[path] = _lines(path, stat.st_mtime_ns, stat.st_size) * source.weight
        shared = min(shared, 1 / max(1.0, source.weight))
    lines = sum(map(round, every.values()))
    # of each file as large a share as it has of the rows
    share = min(shared, plan_tokens.SAMPLED / max(1.0, *every.values()))
    sampled = {path: max(1, round(own * share)) for path, own in every.items()}
    if data.validation_fraction is not None:  # as `load.draw_held_out` draws them
        lines -= max(1, round(lines * data.validation_fraction))
    most = float(data.max_length)
    lengths, how = plan_tokens.lengths(data, model, sampled)
    if not lengths:
        return Rows(0, most, most, most, how="there is nothing in the files")
    texts = plan_tokens.split(data, sampled) if data.too_long == "split" else [False] * len(lengths)
    long = sum(length > most for length in lengths) / len(lengths)
    split = sum(text and length > most for length, text in zip(lengths, texts, strict=True)) / len(lengths)
    kept = used(lengths, data, texts)
    if not kept or lines <= 0:
        return Rows(0, most, most, most, long, split, how)
    attended = sum(length**2 for length in kept) / sum(kept)
    rows = lines * len(kept) / len(lengths)
    if data.packing:
        rows *= sum(kept) / len(kept) / most
        return Rows(max(1, round(rows)), most, most, attended, long, split, how)
    if len(every) > 1:
        random.Random(0).shuffle(kept)  # batches have rows of all files
    batches = [kept[start : start + at_once] for start in range(0, len(kept), at_once)]
    padded = kept if data.padding_free else [max(batch) for batch in batches]
    mean, longest = sum(kept) / len(kept), sum(padded) / len(padded)
    spans = attended if data.padding_free else longest
    return Rows(max(1, round(rows)), mean, longest, spans, long, split, how)


def used(lengths: list[float], data: Data, texts: list[bool]) -> list[float]:
    """What is trained on of rows of these lengths, by `data.too_long`; prompts are taken for long enough.

    Args:
        texts: which of the rows are cut in pieces.
    """
    most, pieces = float(data.max_length), list[float]()
    if data.too_long == "truncate_prompt":
        return [min(length, most) for length in lengths if length > 1]
    for length, text in zip(lengths, texts, strict=True):
        pieces += [most] * int(length // most) + [length % most] if text else [length]
    return [piece for piece in pieces if 1 < piece <= most]


def too_long(rows: Rows | None, data: Data) -> tuple[str, bool]:
    """What becomes of rows that are longer than `data.max_length`, and whether a run would refuse them."""
    if rows is None or not rows.long:
        return "", False
    share = f"{rows.long:.0%} of the rows are longer than data.max_length ({data.max_length})"
    if rows.split == rows.long:
        return f"{share}, and split", False
    if data.too_long == "truncate_prompt":
        return f"{share}; their prompts are cut, and what does not fit then is dropped", False
    if data.too_long == "error":
        return f"{share}, and data.too_long is error", True
    limit, dropped, what = data.expect.dropped, rows.long - rows.split, "and dropped"
    if data.too_long == "split":
        what = f"{dropped:.0%} are chats or have prompts, and dropped: plain text alone is split"
    return f"{share}, {what}; a run lets {limit:.0%} pass (data.expect.dropped)", dropped > limit


def refused(rows: Rows | None, data: Data, batch: Batch) -> str:
    """Why a run would not take the rows; empty: it would, as far as that is known."""
    if rows is None:
        return ""
    paths = [path for source, key in load.named(data) for path in load.files(source.name, key) or ()]
    if why := _unusable(plan_tokens.stamped(paths), data.model_dump_json()):
        return why
    long, refuses = too_long(rows, data)
    if refuses or rows.number >= batch.effective:
        return long if refuses else ""
    if not rows.number and data.validation_fraction is not None:
        return f"no row would be left to train on (data.validation_fraction: {data.validation_fraction:g})"
    if not rows.number:
        return "there is no row to train on"
    number = f"{rows.number:,} rows are" if rows.number > 1 else "1 row is"
    return f"{number} fewer than one step takes (train.effective_batch_size: {batch.effective})"


def known_steps(train: Train, rows: Rows | None, batch: Batch, processes: int) -> int | None:
    """Optimizer steps of the run, if they can be known before the data is prepared."""
    if train.max_steps is not None:
        return train.max_steps
    if rows is None or rows.number < batch.effective:
        return None
    return count_steps(train, rows.number, batch, processes)


@cache  # a plan and each of its changes ask
def _unusable(paths: tuple[tuple[str, int], ...], asked: str) -> str:
    """What is wrong with the first rows, if a run would refuse them."""
    try:
        bad_rows.first_rows(Data.model_validate_json(asked))
    except UserError as error:
        first = error.problems[0]
        return f"{first.what} ({first.where or first.key}); `finetune check` says all"
    return ""


@cache  # a plan and each of its changes count them
def _lines(path: Path, changed: int, size: int) -> int:
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            lines, last = lines + block.count(b"\n"), block[-1:]
    return lines + (last != b"\n")  # the last line may have no end
