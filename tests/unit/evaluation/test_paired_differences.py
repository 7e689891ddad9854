"""Paired differences: intervals and p-values against SciPy, repeated examples, what can be seen at all."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from finetune.evaluation.paired_differences import _sign_test, detectable, difference, standard_error


def test_difference_of_losses_is_the_paired_t_test_where_nothing_is_skewed() -> None:
    random = np.random.default_rng(1)
    base = random.normal(2.0, 1.0, 150)
    change = random.normal(0.1, 0.5, 150)
    change = np.concatenate([change, 0.2 - change])  # symmetric about 0.1
    base = np.concatenate([base, base])
    ours = difference(base.tolist(), (base - change).tolist(), higher_is_better=False, weights=[1] * 300)
    theirs = stats.ttest_rel(base - change, base)
    assert ours["value"] == pytest.approx(-0.1)
    assert ours["p"] == pytest.approx(theirs.pvalue, rel=1e-3)
    interval = theirs.confidence_interval()
    assert (ours["low"], ours["high"]) == pytest.approx((interval.low, interval.high), abs=1e-3)


@pytest.mark.parametrize(("gained", "lost"), [(30, 10), (5, 0), (7, 7), (0, 0), (1, 12)])
def test_difference_of_answers_is_mcnemar_s_mid_p(gained: int, lost: int) -> None:
    base = [0.0] * gained + [1.0] * lost + [1.0] * 60
    tuned = [1.0] * gained + [0.0] * lost + [1.0] * 60
    least = min(gained, lost)
    chance = stats.binom(gained + lost, 0.5)
    mid_p = min(1.0, 2 * (chance.cdf(least) - chance.pmf(least) / 2))
    found = difference(base, tuned, higher_is_better=True)
    assert found["p"] == pytest.approx(mid_p)
    assert found["low"] < found["value"] < found["high"], "no change at all is not certainty"


def test_sign_test_of_groups_of_different_sizes_is_exact() -> None:
    """Every choice of signs, counted."""
    sums = np.array([3.0, -1.0, 2.0, 1.0, -2.0, 1.0, 4.0])
    totals = [
        float(np.dot(np.abs(sums), [1 if index >> place & 1 else -1 for place in range(len(sums))]))
        for index in range(2 ** len(sums))
    ]
    seen = abs(sums.sum())
    more = sum(abs(total) > seen for total in totals) + sum(abs(total) == seen for total in totals) / 2
    assert _sign_test(sums) == pytest.approx(more / len(totals))


def test_interval_of_answers_is_near_the_binomial_one() -> None:
    found = difference([0.0] * 300, [1.0] * 294 + [0.0] * 6, higher_is_better=True)
    assert found["value"] == 0.98 and 0.94 < found["low"] < 0.96 and 0.98 < found["high"] < 1.0


def test_weights_make_it_a_ratio_of_sums() -> None:
    found = difference([10.0, 2.0], [5.0, 3.0], higher_is_better=False, weights=[5, 1])
    assert found["value"] == pytest.approx(-4 / 6) and found["p"] is None


@pytest.mark.parametrize("kind", ["loss", "answers", "f1"])
def test_repeated_examples_are_no_new_evidence(kind: str) -> None:
    random = np.random.default_rng(2)
    base, tuned = random.random((2, 30))
    if kind == "answers":
        base, tuned = (base < 0.5) * 1.0, (tuned < 0.7) * 1.0
    weights = random.integers(3, 30, 30).tolist() if kind == "loss" else None
    once = difference(base, tuned, higher_is_better=True, weights=weights)
    often = difference(
        [*base] * 5,
        [*tuned] * 5,
        higher_is_better=True,
        weights=weights and weights * 5,
        groups=[*range(30)] * 5,
    )
    assert (often["examples"], often["distinct"]) == (150, 30)
    for key in ("value", "low", "high", "p", "standard_error"):
        assert often[key] == pytest.approx(once[key]), key
    naive = difference([*base] * 5, [*tuned] * 5, higher_is_better=True, weights=weights and weights * 5)
    assert naive["high"] - naive["low"] < 0.7 * (once["high"] - once["low"])


def test_too_few_examples_have_no_test() -> None:
    assert difference([], [], higher_is_better=True)["p"] is None
    assert difference([0.0] * 5, [1.0] * 5, higher_is_better=True)["p"] is None
    assert difference([0.0] * 6, [1.0] * 6, higher_is_better=True)["p"] < 0.05
    losses = np.random.default_rng(3).normal(1.0, 0.1, 19)
    assert difference(losses, losses - 1, higher_is_better=False, weights=[1] * 19)["p"] is None
    one = [1000.0] + [1.0] * 29  # thirty examples of which one has nearly all tokens
    assert difference(one, [0.0] * 30, higher_is_better=False, weights=one)["p"] is None
    same = difference([1.0] * 40, [2.0] * 40, higher_is_better=False, weights=[1] * 40, groups=[0] * 40)
    assert same["p"] is None and same["distinct"] == 1


def test_a_broken_model_differs_and_a_broken_base_tells_nothing() -> None:
    broken = difference([1.0] * 9, [float("nan")] * 9, higher_is_better=False)
    assert broken["p"] == 0.0 and np.isnan(broken["value"])
    assert difference([float("inf")] * 9, [1.0] * 9, higher_is_better=False)["p"] == 1.0


def test_a_perplexity_has_the_test_of_its_logarithm() -> None:
    random = np.random.default_rng(4)
    base = random.normal(-3.0, 0.5, 100)
    tuned = base + random.normal(0.05, 0.1, 100)

    def perplexity(mean):
        return np.exp(-mean)

    log = difference(base, tuned, higher_is_better=True, weights=[1] * 100)
    found = difference(base, tuned, higher_is_better=False, of=perplexity)
    assert found["p"] == log["p"] < 0.01 and found["high"] < 0
    assert found["unit"] == pytest.approx(np.exp(3.0), rel=0.05)
    assert found["low"] == pytest.approx(perplexity(base.mean() + log["high"]) - perplexity(base.mean()))


def test_a_metric_that_is_too_large_for_a_number_tells_nothing() -> None:
    def of(mean):
        with np.errstate(over="ignore"):
            return np.exp(mean)

    found = difference([705.0] * 20, [900.0] * 20, higher_is_better=False, of=of)
    assert found["p"] == 1.0 and found["value"] == np.inf
    assert np.isnan(standard_error(np.random.default_rng(3).normal(700.0, 300.0, 20).tolist(), None, of))


def test_detectable_is_the_difference_that_is_found_four_times_in_five() -> None:
    random, found = np.random.default_rng(5), []
    noise = random.normal(0, 0.15, 100)
    least = detectable(difference([0.0] * 100, noise, higher_is_better=False, weights=[1] * 100))
    for _ in range(400):
        change = random.normal(least, 0.15, 100)
        found.append(difference([0.0] * 100, change, higher_is_better=False, weights=[1] * 100)["p"] < 0.05)
    assert 0.7 < np.mean(found) < 0.9
    unchanged = difference([1.0] * 50, [1.0] * 50, higher_is_better=True)
    assert detectable(unchanged) >= 5 / 50, "fewer than five changes one way are never significant"
