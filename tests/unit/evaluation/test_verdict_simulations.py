"""A small form of benchmarks/verdicts.py, and what its stored results must hold.

A percentile bootstrap of each measure alone is far outside of these bars: 26 % false words with few skewed
examples, 40 % with repeated ones, 53 % with twelve tasks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.scripts import module_of

simulated: Any = module_of("benchmarks", "verdicts")
Evaluation = simulated.Evaluation
RUNS = 250


@pytest.mark.parametrize(
    "nothing_changed",
    [
        Evaluation(6, "skewed"),
        Evaluation(20, "skewed"),
        Evaluation(60, "skewed", lengths=0.6),
        Evaluation(30, repeats=5, tasks=3),
        Evaluation(100, tasks=12),
    ],
    ids=str,
)
def test_nothing_changed_seldom_gets_a_false_word(nothing_changed: Any) -> None:
    assert simulated.false_verdicts(nothing_changed, RUNS, seed=1) <= 0.09  # 6 %, and two standard errors


@pytest.mark.parametrize(
    ("change", "metric"),
    [
        (Evaluation(200, gain=0.1, loss=-0.05), "exact_match"),
        (Evaluation(100, lengths=0, loss=-0.05, others=False), "loss"),
    ],
)
def test_a_true_change_is_found(change: Any, metric: str) -> None:
    assert simulated.found(change, metric, RUNS, seed=1) >= 0.75  # 80 %, less two standard errors


def test_equal_types_and_trials_claim_nothing() -> None:
    assert simulated.sole_winners(2, 2, 0.0, RUNS, seed=1) <= 0.09
    found = simulated.best_trials(20, seed=1)
    assert found["loss"] < 1.92 and found["loss, fresh"] == pytest.approx(2.0, abs=0.03)


def test_stored_results_hold_the_bars() -> None:
    """At most 6 % of evaluations with a false word; at least 80 % of the true changes found."""
    stored = json.loads(simulated.RESULTS.read_text())
    shares = [share for sizes in stored["false"].values() for row in sizes.values() for share in row]
    assert stored["runs"] >= 1000 and len(shares) > 30 and max(shares) <= 0.06
    assert stored["found"].keys() == simulated.CHANGES.keys() and min(stored["found"].values()) >= 0.8
    assert all(share <= 0.06 for gaps in stored["winners"].values() for share in gaps["0"])
