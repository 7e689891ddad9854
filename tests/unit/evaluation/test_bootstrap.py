"""Paired bootstrap: intervals against SciPys, verdicts, how often chance alone is called a difference."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from finetune.evaluation.paired_bootstrap import difference, standard_error


def test_the_interval_is_scipys() -> None:
    random = np.random.default_rng(1)
    base = random.normal(2.0, 1.0, 300)
    tuned = base - 0.1 + random.normal(0.0, 0.5, 300)
    ours = difference(base.tolist(), tuned.tolist(), higher_is_better=False)
    theirs = stats.bootstrap(
        (base, tuned), lambda b, t, axis: (t - b).mean(axis), paired=True, method="percentile", rng=2
    ).confidence_interval
    assert ours["value"] == pytest.approx((tuned - base).mean())
    assert (ours["low"], ours["high"]) == pytest.approx((theirs.low, theirs.high), abs=0.006)
    assert ours["verdict"] == "better" and ours["rows"] == 300


def test_weights_make_it_a_ratio_of_sums() -> None:
    base, tuned, tokens = [10.0, 2.0], [5.0, 3.0], [5, 1]
    assert difference(base, tuned, higher_is_better=False, weights=tokens)["value"] == pytest.approx(-4 / 6)


def test_which_way_is_better() -> None:
    low, high = [0.0] * 40 + [1.0] * 20, [1.0] * 60
    assert difference(low, high, higher_is_better=True)["verdict"] == "better"
    assert difference(low, high, higher_is_better=False)["verdict"] == "worse"
    assert difference(high, low, higher_is_better=True)["verdict"] == "worse"


def test_few_rows_tell_nothing() -> None:
    """Five rows that all went up may well be chance: a sign test gives p = 1/16."""
    assert difference([0.0] * 5, [1.0] * 5, higher_is_better=True)["verdict"] == "too few rows"
    assert difference([0.5] * 5, [0.5] * 5, higher_is_better=True)["verdict"] == "too few rows"
    assert difference([0.5] * 6, [0.5] * 6, higher_is_better=True)["verdict"] == "same"
    assert difference([0.0] * 6, [1.0] * 6, higher_is_better=True)["verdict"] == "better"
    assert difference([], [], higher_is_better=True)["verdict"] == "too few rows"


def test_equal_rows_are_the_same_and_a_broken_model_is_worse() -> None:
    assert difference([0.1, 0.7] * 50, [0.1, 0.7] * 50, higher_is_better=True) == {
        "value": 0.0,
        "low": 0.0,
        "high": 0.0,
        "rows": 100,
        "verdict": "same",
    }
    broken = difference([1.0] * 9, [float("nan")] * 9, higher_is_better=False)
    assert broken["verdict"] == "worse"


def test_chance_alone_is_seldom_called_a_difference() -> None:
    """400 pairs of models that are equally good: about 5 % may be called different, 10 % may not."""
    random, called = np.random.default_rng(3), 0
    for _ in range(400):
        base, tuned = (random.random((2, 80)) < 0.6).astype(float)
        called += difference(base, tuned, higher_is_better=True)["verdict"] != "same"
    assert 4 <= called <= 36


def test_a_metric_that_is_too_large_for_a_number_tells_nothing() -> None:
    def of(mean):
        with np.errstate(over="ignore"):
            return np.exp(mean)

    base, random = [705.0] * 20, np.random.default_rng(3)
    for tuned, value in (([900.0] * 20, np.inf), (random.normal(700.0, 30.0, 20).tolist(), None)):
        found = difference(base, tuned, higher_is_better=False, of=of)
        assert found["verdict"] == "same" and value in (None, found["value"])
        assert np.isnan(standard_error(tuned, None, of))
