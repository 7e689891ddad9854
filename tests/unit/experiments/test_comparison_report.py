"""Comparing: who wins by which figures. The runs themselves: test_compare.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from finetune.experiments.comparison import comparison_report
from finetune.run_folder import comparability, run_folder


def of(runs: int = 3, **types: tuple[float, float | None, float]) -> dict:
    """Types with quality, its deviation over so many runs, and seconds of training."""
    return {
        kind: {
            "quality": {"mean": quality, "sd": spread, "runs": runs},
            **{key: {"mean": cost, "sd": 0.0} for key in ("train_seconds", "memory_gib", "bytes")},
        }
        for kind, (quality, spread, cost) in types.items()
    }


def won(types: dict) -> dict:
    rows = [{"type": kind, "seed": 1, "run": kind, "quality": 0.5} for kind in types]
    return comparison_report.winner(types, rows, "exact match", True, False) or {}


def test_a_winner_claims_no_more_than_the_seeds_show() -> None:
    clear = won(of(lora=(0.9, 0.01, 5), dora=(0.5, 0.01, 1)))
    assert (
        clear["type"] == "lora"
        and clear["within_noise"] == ["lora"]
        and "significantly worse" in clear["why"]
    )
    close = won(of(lora=(0.90, 0.03, 5), dora=(0.88, 0.01, 1), ia3=(0.5, 0.0, 0.1)))
    assert close["type"] == "dora" and close["within_noise"] == ["lora", "dora"]
    assert "wins by the shortest training. These types have no significant difference" in close["why"]
    both = won(of(lora=(0.90, 0.03, 1), dora=(0.88, 0.01, 5)))
    assert both["type"] == "lora" and "types without a significant difference" in both["why"]
    once = won(of(lora=(0.9, None, 5), dora=(0.88, None, 1)))
    assert once["type"] == "lora" and "One run per type does not show the seed noise" in once["why"]
    assert comparison_report.winner({}, [], "", True, False) is None


def test_winner_of_two_seeds_needs_a_gap_that_two_seeds_can_show() -> None:
    """Three standard deviations apart is no proof with two seeds, and is with five."""
    apart = {"lora": (0.90, 0.02, 5), "dora": (0.84, 0.02, 1)}
    assert won(of(2, **apart))["within_noise"] == ["lora", "dora"]
    assert won(of(5, **apart))["within_noise"] == ["lora"]
    many = {f"t{number}": (0.84, 0.02, 1) for number in range(12)}
    assert len(won(of(3, lora=(0.90, 0.02, 5), dora=(0.84, 0.02, 1)))["within_noise"]) == 1
    assert len(won(of(3, lora=(0.90, 0.02, 5), **many))["within_noise"]) == 13, "all pairs count"


def test_winner_by_less_than_what_matters_is_no_sole_winner() -> None:
    types = of(lora=(0.905, 0.0001, 5), dora=(0.9, 0.0001, 1))
    assert won(types)["within_noise"] == ["lora"]
    for one in types.values():
        one["quality"]["least"] = 0.01
    assert won(types)["within_noise"] == ["lora", "dora"] and "0.01" in won(types)["rule"]


def test_seeds_that_agree_to_the_last_answer_are_no_certainty() -> None:
    """Twenty examples: 10 and 11 right answers, twice each."""
    types = of(2, lora=(0.55, 0.0, 5), dora=(0.5, 0.0, 1))
    assert won(types)["within_noise"] == ["lora"]
    for one in types.values():
        one["quality"]["resolution"] = 0.05
    assert won(types)["within_noise"] == ["lora", "dora"]


@pytest.mark.parametrize(("higher", "run"), [(True, "c"), (False, "d")])
def test_winner_offers_the_run_of_the_median_seed(higher: bool, run: str) -> None:
    scores = {"a": 0.1, "b": 0.9, "c": 0.4, "d": 0.6}
    rows = [{"type": "lora", "seed": 1, "run": name, "quality": value} for name, value in scores.items()]
    found = comparison_report.winner(of(4, lora=(0.5, 0.3, 1)), rows, "exact match", higher, False)
    assert found and found["run"] == run, "of two in the middle the worse one"


def test_two_types_have_the_same_chance_by_welch_and_by_games_howell() -> None:
    one, other = ({"mean": mean, "sd": sd, "runs": 3} for mean, sd in ((0.9, 0.02), (0.84, 0.05)))
    welch = stats.ttest_ind_from_stats(0.9, 0.02, 3, 0.84, 0.05, 3, equal_var=False).pvalue
    assert comparison_report.chance(one, other, 2) == pytest.approx(welch)
    degrees = (0.02**2 + 0.05**2) ** 2 / ((0.02**4 + 0.05**4) / 2)
    range_ = 2**0.5 * 0.06 / ((0.02**2 + 0.05**2) / 3) ** 0.5
    assert stats.studentized_range.sf(range_, 2, degrees) == pytest.approx(welch, rel=1e-3)
    assert comparison_report.chance(one, other, 6) > 2 * welch


def test_equal_types_seldom_have_a_sole_winner() -> None:
    """Two equal types with two seeds: at most 6 % (31 % by the spread of the seeds)."""
    random, sole = np.random.default_rng(0), 0
    for _ in range(1000):
        sides = random.normal(0.7, 0.02, (2, 2))
        means, spreads = sides.mean(axis=1), sides.std(axis=1, ddof=1)
        types = of(2, **{kind: (means[at], spreads[at], 1) for at, kind in enumerate(("lora", "dora"))})
        sole += len(won(types)["within_noise"]) == 1
    assert 10 <= sole <= 60


def test_figures_that_are_not_finite_rank_nothing() -> None:
    nan = float("nan")
    rows = [
        dict.fromkeys((m.key for m in comparison_report.MEASURES), value) | {"steps": 2}
        for value in (nan, 1.0)
    ]
    broken = comparison_report.averages(rows)
    assert math.isnan(broken["quality"]["mean"]) and math.isnan(broken["quality"]["sd"])
    types = of(lora=(0.5, 0.1, 1), dora=(nan, nan, 0.5), ia3=(float("inf"), nan, 0.5))
    assert won(types)["type"] == "lora" and won(types)["within_noise"] == ["lora"]
    assert won(of(lora=(nan, nan, 1))) == {} and comparison_report.front(types, "bytes", True) == ["lora"]
    assert comparability.unequal({"loss": nan}, {"loss": float("nan")}) == []


def test_types_that_tie_without_held_out_rows_keep_their_metric(tmp_path, monkeypatch) -> None:
    figures = dict.fromkeys((measure.key for measure in comparison_report.MEASURES), 1.0)
    figures |= {"steps": 2, "metric": "t acc", "higher_is_better": True, "quality": 0.5, "loss": None}
    monkeypatch.setattr(comparison_report, "not_comparable", lambda *_: {})
    monkeypatch.setattr(
        comparison_report,
        "row",
        lambda run: {**figures, "run": run.path.name, "type": run.path.name, "seed": 1},
    )
    kinds = ["lora", "ia3"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / comparison_report.MARK).touch()
    settings = {"recipe": "r", "budget_seconds": None, "runs": kinds, "entrants": {k: {} for k in kinds}}
    made = comparison_report.collect(tmp_path, settings, {})
    assert made["metric"] == "t acc" and made["types"]["lora"]["quality"]["mean"] == 0.5
    assert made["winner"]["type"] == "lora"


def test_the_front_is_what_nothing_beats_in_both() -> None:
    types = of(a=(0.9, 0, 5), b=(0.8, 0, 1), c=(0.7, 0, 3), d=(0.9, 0, 7))
    assert comparison_report.front(types, "bytes", True) == ["a", "b"]
    assert comparison_report.front(types, "bytes", False) == ["b", "c"]


def test_level_runs_rank_by_loss_with_the_recipes_smallest_difference(tmp_path) -> None:
    """No run answers anything right: the loss decides, by `eval.min_loss_difference` of the recipe."""
    rows = []
    for name, loss in (("lora-seed1", 1.0), ("dora-seed1", 1.1)):
        folder = run_folder.RunFolder(tmp_path / name)
        folder.path.mkdir()
        settings = {"rows": 10, "min_loss_difference": 0.25}
        tuned = {"loss": loss, "exact_match": 0.0}
        folder.write("eval.json", {"settings": settings, "tuned": tuned, "tasks": {}})
        mark = {"identity": "one", "seconds": 1.0, "host_memory_before_gib": 0.0}
        folder.write(comparison_report.MARK, mark)
        rows.append(comparison_report.row(folder))
    assert {row["metric"] for row in rows} == {"exact match"}
    comparison_report.rank_level_runs_by_loss(rows)
    assert {row["metric"] for row in rows} == {"validation loss"}
    assert [(row["quality"], row["least"]) for row in rows] == [(1.0, 0.25), (1.1, 0.25)]
