"""Compare two models on the same examples: difference, interval, p-value and detectable difference.

Equal examples form one group, because they carry the same information.

Right and wrong answers get an exact sign test over groups (McNemar's test, mid-p).

Other metrics are ratios of sums, such as nats per token. They get two tests, and the larger p-value counts:

- a jackknife t test on the residuals of the ratio; the effective number of groups sets the degrees of freedom
- Hall's test, which corrects for skewness

`benchmarks/verdicts.py` measures how often chance passes both tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtr, stdtr, stdtrit

LEVEL = 0.05
POWER = 0.8
"""Probability with which the detectable difference would be found."""
MIN_EXAMPLES = 20
"""Minimum of distinct examples (weighted by their tokens) for testing a loss.

Fewer examples hide its skewness.
"""
MIN_ANSWERS = 6
"""Minimum of distinct examples for the exact test of right and wrong answers."""
SKEWNESS_FACTOR = 1.75
"""Correction, because a small sample underestimates the skewness of a long tail."""


class Estimate(NamedTuple):
    """A difference with its interval and standard error, in units of the mean."""

    low: float
    high: float
    p: float | None
    """p-value of no difference. `None` if there are too few examples to test."""
    standard_error: float
    freedom: float


def difference(
    base: Sequence[float],
    tuned: Sequence[float],
    *,
    higher_is_better: bool,
    weights: Sequence[float] | None = None,
    groups: Sequence[Hashable] | None = None,
    of: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Return tuned - base of a metric on the same examples, with its 95 % interval and p-value.

    Args:
        base: one value per example. With `weights`, a value is a sum over the example.
        tuned: the same for the fine-tuned model, in the same order.
        weights: the weight of each example, such as its number of tokens. The default is 1.
        groups: a label per example. Equal examples have equal labels. By default, all examples differ.
        of: computes the metric from the weighted mean. By default, the metric is the mean.

    Returns:
        A dict with `value`, `low`, `high`, `examples`, `distinct` (the number of groups) and
        `higher_is_better`. The other keys are for `verdicts.decide`.
    """
    before, after = np.asarray(base, float), np.asarray(tuned, float)
    counts = np.ones(len(before)) if weights is None else np.asarray(weights, float)
    codes, distinct = _codes(groups, len(before))
    kind = "loss" if of or weights is not None else "score"
    found = {
        "examples": len(before),
        "distinct": distinct,
        "higher_is_better": higher_is_better,
        "kind": kind,
    }
    untested = {"standard_error": None, "freedom": None, "unit": 1.0, "needed": MIN_EXAMPLES}
    if not len(before):
        return {"value": 0.0, "low": 0.0, "high": 0.0, **found, "p": None, **untested}
    metric = of or (lambda mean: mean)
    with np.errstate(invalid="ignore"):  # inf - inf
        means = before.sum() / counts.sum(), after.sum() / counts.sum()
        value = float(metric(means[1]) - metric(means[0]))
    if not math.isfinite(value):  # NaN or Inf: tuned is worse only if all values of the base model are finite
        broken = np.isfinite(before).all() and not np.isfinite(after).all()
        return {"value": value, "low": value, "high": value, **found, "p": 0.0 if broken else 1.0, **untested}
    sums, sizes = np.bincount(codes, after - before), np.bincount(codes, counts)
    binary = kind == "score" and bool(np.isin([before, after], (0, 1)).all())
    estimate = _of_answers(sums, sizes) if binary else _of_ratio(sums, sizes)
    unit = 1.0 if binary or kind == "loss" or max(before.max(), after.max()) <= 1 else 100.0
    low, high, error = estimate.low, estimate.high, estimate.standard_error
    if of:  # scale at the base model's mean
        with np.errstate(over="ignore"):
            ends = [float(of(means[0] + end) - of(means[0])) for end in (low, high)]
            unit = abs(float(of(means[0] + 0.01) - of(means[0]))) / 0.01
        low, high, error = min(ends), max(ends), error * unit
    found |= {"p": estimate.p, "standard_error": error, "freedom": estimate.freedom, "unit": unit}
    found["needed"] = MIN_ANSWERS if binary else MIN_EXAMPLES
    return {"value": value, "low": low, "high": high, **found}


def _codes(groups: Sequence[Hashable] | None, count: int) -> tuple[Any, int]:
    """Return each example's group as a number from 0, and the number of groups."""
    if groups is None:
        return np.arange(count), count
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(group, len(numbers)) for group in groups]
    return np.asarray(codes, int), len(numbers)


def _of_answers(sums: np.ndarray, sizes: np.ndarray) -> Estimate:
    """Estimate the difference in correct answers.

    The interval follows Bonett and Price (2012). It adds one group in each direction, so that no change at
    all does not look certain.

    Args:
        sums: for each group, the gain in correct answers.
        sizes: for each group, the number of answers.
    """
    typical = sizes.mean()
    widened = _of_ratio(
        np.append(sums, [typical, -typical]), np.append(sizes, [typical, typical]), skewed=False
    )
    return widened._replace(
        low=max(widened.low, -1.0),
        high=min(widened.high, 1.0),
        p=_sign_test(sums) if len(sums) >= MIN_ANSWERS else None,
    )


def _sign_test(sums: np.ndarray) -> float:
    """Return the mid-p value for the total of `sums` if each sign is random."""
    sizes = np.abs(np.rint(sums)).astype(int)
    sizes = sizes[sizes > 0]
    if not len(sizes):
        return 1.0
    least = int(min(sums[sums > 0].sum(), -sums[sums < 0].sum()).round())
    if (sizes == sizes[0]).all():
        fewer, count = least // sizes[0], len(sizes)
        return min(1.0, float(bdtr(fewer, count, 0.5) + (bdtr(fewer - 1, count, 0.5) if fewer else 0.0)))
    chances = np.ones(1)  # probability of each total of the positive values
    for size in sizes:
        more = np.zeros(len(chances) + size)
        more[: len(chances)] = chances / 2
        more[size:] += chances / 2
        chances = more
    return min(1.0, 2 * (chances[:least].sum() + chances[least] / 2))


def _of_ratio(sums: np.ndarray, sizes: np.ndarray, *, skewed: bool = True) -> Estimate:
    """Estimate sum(sums) / sum(sizes) over groups. `skewed` adds the correction for skewness."""
    total, count = sizes.sum(), len(sums)
    mean = sums.sum() / total
    effective = float(total**2 / (sizes**2).sum())  # Kish
    if count < 2:
        return Estimate(-math.inf, math.inf, None, math.inf, 0.0)
    residuals = sums - mean * sizes
    jackknife = residuals / (1 - sizes / total)
    error = math.sqrt((jackknife**2).sum() * (count - 1) / count) / total
    freedom = max(effective - 1, 1.0)
    skewness = _skewness(residuals) if skewed else 0.0
    near = float(stdtrit(freedom, 1 - LEVEL / 2))
    ends = [*(_hall_inverse(end, skewness, count) for end in (near, -near)), near, -near]
    low, high = mean - error * max(ends), mean - error * min(ends)
    p = None
    if effective >= MIN_EXAMPLES:
        p = float(mean == 0) if error == 0 else _p_value(mean / error, skewness, count, freedom)
    return Estimate(float(low), float(high), p, error, freedom)


def _skewness(residuals: np.ndarray) -> float:
    spread = (residuals**2).mean()
    return float(SKEWNESS_FACTOR * (residuals**3).mean() / spread**1.5) if spread > 0 else 0.0


def _p_value(t: float, skewness: float, count: int, freedom: float) -> float:
    """Return the larger p-value of the t test and Hall's test.

    See Hall (1992), The Bootstrap and Edgeworth Expansion, section 3.9.
    """
    root = math.sqrt(count)
    hall = t + skewness * t**2 / (3 * root) + skewness**2 * t**3 / (27 * count) + skewness / (6 * root)
    return float(2 * stdtr(freedom, -min(abs(t), abs(hall))))


def _hall_inverse(y: float, skewness: float, count: int) -> float:
    """Return the t that Hall's transformation maps to `y`."""
    if abs(skewness) < 1e-6:
        return y
    root = math.sqrt(count)
    return 3 * root / skewness * (float(np.cbrt(1 + skewness / root * (y - skewness / (6 * root)))) - 1)


def detectable(found: dict[str, Any], level: float = LEVEL) -> float:
    """Return the difference that these examples would show with probability POWER, in units of the metric."""
    error, freedom = found["standard_error"], found["freedom"]
    if error is None or not math.isfinite(error):
        return math.inf
    least = error * float(stdtrit(freedom, 1 - level / 2) + stdtrit(freedom, POWER))
    if found["kind"] == "score":  # a sign test needs at least this many groups that change in one direction
        least = max(least, math.ceil(math.log2(1 / level)) / found["distinct"] * found["unit"])
    return least


def standard_error(
    values: Sequence[float], weights: Sequence[float] | None, of: Callable[[Any], Any]
) -> float:
    """Return the standard error of one model's metric, from the jackknife error of its mean."""
    sums = np.asarray(values, float)
    sizes = np.ones(len(sums)) if weights is None else np.asarray(weights, float)
    mean, error = sums.sum() / sizes.sum(), _of_ratio(sums, sizes).standard_error
    with np.errstate(over="ignore", invalid="ignore"):
        found = abs(float(of(mean + error) - of(mean - error))) / 2
    return found if math.isfinite(found) else math.nan
