"""How good a sweep's best trial is on examples that did not choose it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from finetune.experiments.sweep import chosen_score
from finetune.run_folder.run_folder import RunFolder


def test_fresh_loss_of_equal_trials_is_the_true_one() -> None:
    """The best of 20 equal trials reads too low on the examples that chose it, and right on others."""
    random, read, fresh = np.random.default_rng(0), [], []
    tokens, groups = np.full(100, 10.0), np.arange(100)
    for _ in range(30):
        losses = 10 * random.normal(2.0, 0.5, (20, 100))
        read.append(losses.sum(axis=1).min() / tokens.sum())
        fresh.append(chosen_score.fresh_loss(losses, tokens, groups))
    assert np.mean(read) < 1.93
    assert np.mean(fresh) == pytest.approx(2.0, abs=0.03)


def test_fresh_loss_of_a_trial_that_is_better_is_its_own() -> None:
    losses = np.array([[20.0] * 50, [10.0] * 50])
    assert chosen_score.fresh_loss(losses, np.full(50, 10.0), np.arange(50)) == 1.0


def test_fresh_loss_keeps_equal_examples_in_one_half() -> None:
    """Two examples, each fifty times: the trial that knows one by heart does not know the other."""
    groups = np.repeat([0, 1], 50)
    losses = np.array([np.where(groups == 0, 0.0, 30.0), np.where(groups == 0, 30.0, 0.0)])
    assert chosen_score.fresh_loss(losses, np.full(100, 10.0), groups) == 3.0


def test_optimism_is_what_the_best_of_equal_trials_reads_too_high() -> None:
    random = np.random.default_rng(1)
    best = random.binomial(100, 0.7, (4000, 20)).max(axis=1) / 100
    found = chosen_score.optimism(0.7, 100, 20)["optimism"]
    assert found == pytest.approx(best.mean() - 0.7, abs=0.01)


def test_assess_reads_the_trials_folders(tmp_path: Path) -> None:
    rows = [{"folder": f"trial-{number}", "value": 1.0 + number} for number in range(2)]
    examples = {"group": [0, 1, 2], "tokens": [2, 2, 2]}
    for row in rows:
        (tmp_path / row["folder"]).mkdir()
        folder = RunFolder(tmp_path / row["folder"])
        scores = {"base": {"loss": [9.0] * 3}, "tuned": {"loss": [2 * row["value"]] * 3}}
        folder.write("eval.json", {"examples": {**examples, **scores}})
        folder.write("data_report.json", {"train": {}, "validation": {"kept": 50}})
    found = chosen_score.assess(tmp_path, rows, rows[0], "loss")
    assert found == {"fresh": 1.0, "examples": 3, "trials": 2}
    assert "Expect a loss of 1 on new examples." in chosen_score.described(found)
    answers = chosen_score.assess(tmp_path, rows, {**rows[0], "value": 0.7}, "exact_match")
    assert "The best of 2 equally good trials scores about 3.8 points too high" in chosen_score.described(
        answers
    )
    RunFolder(tmp_path / "trial-1").write("eval.json", {})
    assert chosen_score.assess(tmp_path, rows, rows[0], "loss") == {}
    assert chosen_score.assess(tmp_path, rows[:1], rows[0], "loss") == {}
    assert chosen_score.described({}) == ""
