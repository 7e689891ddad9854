"""The weights of the sources in `data.name`: how often an epoch uses each of their documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from finetune.core.errors import Problem, raise_if_any

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from finetune.data.audit import Audit, Report
    from finetune.recipe.schema import Source


def counted_so_far(audit: Audit) -> tuple[int, int, int]:
    """Return the documents, rows and tokens that an audit has counted before a source."""
    return len(audit.lengths), audit.report.rows, audit.report.tokens


def count(
    audit: Audit, source: Source, title: str, before: tuple[int, int, int], seed: int
) -> NDArray[np.int64]:
    """Return how often an epoch uses each document of a source, and add the source to the report.

    Args:
        audit: it has counted the source last.
        before: `counted_so_far` before the source.
        seed: `train.seed`.
    """
    documents, rows, tokens = before
    found = times(source.weight, audit.digests[documents:], seed)
    lengths = np.frombuffer(audit.lengths, dtype=np.int32)[documents:]
    audit.report.mix[title] = {
        "weight": source.weight,
        "rows": audit.report.rows - rows,
        "tokens": audit.report.tokens - tokens,
        "used_tokens": int(found @ lengths.astype(np.int64)),
    }
    return found


def times(weight: float, digests: array[int], seed: int) -> NDArray[np.int64]:
    """Return how often each document of a source is used.

    Each document is used as often as the integer part of the weight. A hash selects the documents that are
    used once more for the fractional part.
    """
    mixed = np.frombuffer(digests, dtype=np.uint64) ^ np.uint64(seed)
    lots = mixed * np.uint64(0x9E3779B97F4A7C15)
    once_more = lots / 2.0**64 < weight % 1
    return int(weight) + once_more.astype(np.int64)


def check(report: Report) -> None:
    """Check that an epoch uses a part of every source.

    Raises:
        UserError: no example of a source is used (exit 2).
    """
    raise_if_any(
        Problem(
            "a source has so small a weight that the run uses none of its examples",
            "data.name",
            found=f"{name}: weight {source['weight']:g}, {source['rows']:,} examples",
            fix=f"raise the weight well above {1 / source['rows']:.2g}, or remove the source",
            code="data-empty",
        )
        for name, source in report.mix.items()
        if source["tokens"] and not source["used_tokens"]
    )


def notes(report: Report) -> Iterator[str]:
    """Yield a note for each source of which the run uses only a part."""
    for name, source in report.mix.items():
        if source["used_tokens"] < source["tokens"]:
            part = f"{source['used_tokens']:,} of its {source['tokens']:,} tokens, the same in each epoch"
            yield f"{name}: the run uses {part} (weight {source['weight']:g})"
