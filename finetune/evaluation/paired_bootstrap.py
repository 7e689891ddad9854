"""Is tuned better than base on the same rows? A paired bootstrap of the difference, and a verdict.

Rows are drawn with replacement, base and tuned together (Efron and Tibshirani 1993; Koehn 2004 for language
models), so that what makes a row hard for both does not count as noise.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ITERATIONS = 10_000
AT_ONCE = 4_000_000  # draws held in memory: 32 MB
# Fewer rows that differ can't tell at 95 %: if all of them point one way, a sign test still gives p > .05
FEWEST = 6
TOO_FEW = "too few rows"


def difference(
    base: Sequence[float],
    tuned: Sequence[float],
    *,
    higher_is_better: bool,
    weights: Sequence[float] | None = None,
    of: Callable[[Any], Any] = lambda mean: mean,
) -> dict[str, Any]:
    """tuned - base of a metric over rows, with its 95 % interval and what it means.

    Args:
        base, tuned: one value a row, in the same order; with `weights` the row's sum, not its mean.
        weights: what each row counts, such as its number of tokens; `None`: 1.
        of: the metric, given the mean over rows (`weights`: sum of values over sum of weights).

    Returns:
        {"value", "low", "high", "rows", "verdict": "better" | "same" | "worse" | TOO_FEW}, the last where
        no difference could have been told from chance
    """
    before, after = np.asarray(base, float), np.asarray(tuned, float)
    counts = np.ones(len(before)) if weights is None else np.asarray(weights, float)
    if not len(before):
        return {"value": 0.0, "low": 0.0, "high": 0.0, "rows": 0, "verdict": TOO_FEW}
    with np.errstate(invalid="ignore"):  # inf - inf
        value = float(of(after.sum() / counts.sum()) - of(before.sum() / counts.sum()))
    if not math.isfinite(value):  # a loss of inf or nan: no number of draws makes it comparable
        verdict = "worse" if np.isfinite(before).all() else "same"
        if np.isfinite([*before, *after]).all():  # it is the metric that is too large for a number
            verdict = "same"
        return {"value": value, "low": value, "high": value, "rows": len(before), "verdict": verdict}
    drawn = np.sort(_resampled(before, after, counts, of))
    low, high = -math.inf, math.inf  # where some draws of a metric are too large for a number
    if np.isfinite(drawn).all():
        low, high = float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))
    differ = int((before != after).sum())
    verdict = "same" if len(before) >= FEWEST else TOO_FEW
    if differ >= FEWEST and not low <= 0 <= high:
        verdict = "better" if (value > 0) == higher_is_better else "worse"
    return {"value": value, "low": low, "high": high, "rows": len(before), "verdict": verdict}


def _resampled(before: Any, after: Any, counts: Any, of: Callable[[Any], Any]) -> Any:
    """ITERATIONS differences of the metric, each over as many rows drawn with replacement."""
    if (before == after).all():
        return np.zeros(1)
    random, rows = np.random.default_rng(0), len(before)
    found, step = [], max(1, AT_ONCE // rows)
    for start in range(0, ITERATIONS, step):
        drawn = random.integers(rows, size=(min(step, ITERATIONS - start), rows))
        weight = counts[drawn].sum(axis=1)
        with np.errstate(invalid="ignore"):
            found.append(of(after[drawn].sum(axis=1) / weight) - of(before[drawn].sum(axis=1) / weight))
    return np.concatenate(found)


def standard_error(
    values: Sequence[float], weights: Sequence[float] | None, of: Callable[[Any], Any]
) -> float:
    """Of one model's metric, by the same draws: the deviation of the metric over them."""
    found = np.asarray(values, float)
    counts = np.ones(len(found)) if weights is None else np.asarray(weights, float)
    random, step = np.random.default_rng(0), max(1, AT_ONCE // len(found))
    drawn = []
    for start in range(0, ITERATIONS, step):
        rows = random.integers(len(found), size=(min(step, ITERATIONS - start), len(found)))
        drawn.append(of(found[rows].sum(axis=1) / counts[rows].sum(axis=1)))
    metrics = np.concatenate(drawn)
    return float(np.std(metrics)) if np.isfinite(metrics).all() else math.nan
