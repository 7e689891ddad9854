"""What becomes of an ablation's optimizations, by the figures of their runs: noise, loss gates, turns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from finetune.cli import main
from finetune.core.console import Console
from finetune.experiments.ablation import ablation, ablation_report, optimizations
from finetune.experiments.ablation import verdict as ablation_verdict
from finetune.experiments.ablation.optimizations import Optimization, Variant
from finetune.experiments.runner import kept_runs, measured_run
from finetune.hardware import detection
from finetune.recipe.loader import load
from support.paths import QUICKSTART, ROOT

SHIPPED = optimizations.read(ROOT / "recipes" / "ablation.yaml")


def runs(
    rate: float, *, loss: float = 1.0, memory: float = 1.0, held_out: float | None = 1.0, noise: float = 0.0
) -> list[Any]:
    """Two runs, of which the first is evaluated on 100 examples; `noise`: of each one's loss."""
    one = {"failed": "", "step_seconds": 1.0, "first_step_seconds": 1.0, "mfu": None, "memory_gib": memory}
    one |= {"held_out": held_out, "losses": [2 * loss, loss, loss, loss]}
    rates = [rate * 0.99, rate * 1.01]
    found = [one | {"tokens_per_second": value, "tokens_per_cpu_second": 50.0} for value in rates]
    if held_out is not None:
        each = [10 * (held_out + (noise if number % 2 else -noise)) for number in range(100)]
        found[0]["examples"] = {"group": [*range(100)], "tokens": [10] * 100, "tuned": {"loss": each}}
    return found


def bench(**groups: list[Any]) -> ablation.Bench:
    asked = ablation.AblationRequest(str(QUICKSTART), [], Path("ablation.yaml"), Path("results"))
    here = detection.detect()
    files = kept_runs.files_read(load(QUICKSTART))
    made = ablation.Bench(asked, SHIPPED, here, Console(quiet=True), files)
    made.groups = {ablation.key(Variant(None, {"is": name})): group for name, group in groups.items()}
    return made


def judged(after: list[Any], **optimization: Any) -> dict[str, Any]:
    made = Optimization.model_validate({"name": "it", "kind": "it", "what": "it", **optimization})
    before = runs(100)
    return ablation_verdict.judge(bench(before=before, after=after).scale, made, after, before, before)


def test_what_noise_explains_is_no_gain() -> None:
    assert judged(runs(101))["verdict"] == "dropped"
    assert judged(runs(110))["verdict"] == "kept"
    slower = judged(runs(90))
    assert slower["verdict"] == "dropped" and slower["worse"]


def test_what_gains_nothing_is_kept_for_what_made_more_on_it() -> None:
    """bf16 gains nothing in eager passes of few tokens, and compiling stands on it."""
    made = Optimization.model_validate({"name": "it", "kind": "it", "what": "it"})
    before = runs(100)

    def said(rate: float, of: float = 98, verdict: str = "dropped", **row: Any) -> tuple[str, str]:
        alone = {"verdict": verdict, "tokens_per_second": rate}
        rows = [{"name": "it", "on": []}, {"name": "more", "on": ["it"], "status": "", "alone": alone, **row}]
        after = runs(of)
        scale = bench(before=before, after=after).scale
        found = ablation_verdict.judge(scale, made, after, before, before, rows)
        return found["verdict"], found["why"]

    loss = "validation loss +0.0% (+0.0% to +0.0%)"
    assert said(150) == (
        "kept",
        f"-2.0% tokens/s (noise 2.8%), {loss}, but more needs it and was faster alone",
    )
    assert said(101)[0] == said(150, verdict="failed")[0] == said(150, on=["other"])[0] == "dropped"
    assert said(150, of=90)[0] == said(150, status="skipped")[0] == "dropped"


def test_a_busy_cpu_is_judged_by_cpu_seconds() -> None:
    quiet, busy = bench(a=runs(100)), bench(a=runs(100), b=[*runs(100), *runs(50)])
    quiet.choose_rate()
    busy.choose_rate()
    assert (quiet.rate, busy.rate) == ("tokens_per_second", "tokens_per_cpu_second")


def test_the_loss_gate() -> None:
    assert judged(runs(200, loss=1.01))["verdict"] == "kept"
    assert judged(runs(200, loss=1.03))["verdict"] == "failed"
    assert judged(runs(200, loss=float("nan")))["verdict"] == "failed"
    assert judged(runs(200, loss=1.3), gate="held_out")["verdict"] == "kept"
    assert judged(runs(200, loss=1.3, held_out=None), gate="held_out")["verdict"] == "failed"
    assert judged(runs(200, loss=1.0, held_out=None), gate="held_out")["verdict"] == "kept"


@pytest.mark.parametrize("gate", ["curve", "held_out"])
def test_an_option_whose_loss_costs_more_than_allowed_is_not_kept(gate: str) -> None:
    cheap = judged(runs(200, held_out=1.005), gate=gate)
    assert cheap["verdict"] == "kept" and "validation loss +0.5% (+0.5% to +0.5%)" in cheap["why"]
    dear = judged(runs(200, held_out=1.048), gate=gate)
    assert (
        dear["verdict"] == "failed" and "is +4.8% (+4.8% to +4.8%) higher; the limit is 1.0%" in dear["why"]
    )
    broken = judged(runs(200, held_out=float("nan")), gate=gate)
    assert broken["verdict"] == "failed"
    unclear = judged(runs(200, held_out=1.005, noise=0.1), gate=gate)
    assert (
        unclear["verdict"] == "failed"
        and "may be more than 1.0% higher (+0.5% (-1.5% to +2.5%))" in unclear["why"]
    )
    assert "measure.held_out_rows" in unclear["why"]


@pytest.mark.parametrize("damage", [{"tuned": {"loss": [0.0] * 100}}, {"tokens": [0] * 100}])
def test_baseline_without_a_validation_loss_has_no_cost(damage: dict[str, Any]) -> None:
    gate, own = runs(200), runs(200)
    for run in (gate[0], own[0]):
        run["examples"] |= damage
    assert ablation_verdict.loss_cost(own, gate) is None


def test_headline_compares_with_the_recipe_and_names_the_plain_loop_beside() -> None:
    def side(rate: float) -> dict[str, Any]:
        return {"tokens_per_second": rate, "memory_gib": 1.0, "optimizations": ["packing"]}

    found = {"rate": "tokens_per_second", "baseline": side(100), "as_is": side(200), "stack": side(300)}
    said = ablation_report.headline(found | {"speedup": 3.0})
    assert said.startswith("packing: 1.50 times the speed of your recipe (200 -> 300 tokens/s)")
    assert said.endswith("3.00 times the speed of the baseline")
    assert "the run of your recipe failed" in ablation_report.headline(
        found | {"speedup": 3.0, "as_is": None}
    )
    slower = ablation_report.headline(found | {"speedup": 3.0, "as_is": side(400)})
    assert "0.75 times" in slower and "your recipe is faster" in slower


def test_an_optimization_for_memory_is_kept_for_memory_alone() -> None:
    assert judged(runs(100, memory=0.8), gain="memory")["verdict"] == "kept"
    assert judged(runs(90, memory=0.8), gain="memory")["verdict"] == "dropped"
    assert judged(runs(200, memory=1.0), gain="memory")["verdict"] == "dropped"


def test_memory_option_that_loses_more_speed_than_it_saves_is_dropped_on_a_noisy_machine() -> None:
    after = runs(82, memory=0.9)
    after[0]["tokens_per_second"], after[1]["tokens_per_second"] = 66, 98
    found = judged(after, gain="memory")
    assert found["noise"] > 0.18 and found["verdict"] == "dropped"


def test_noise_of_memory_is_measured() -> None:
    """Not 2 %, whatever it is: a steady peak shows 1.5 %, a shaky one does not show 5."""
    assert judged(runs(100, memory=0.985), gain="memory")["verdict"] == "kept"
    shaky = runs(100, memory=0.95)
    shaky[0]["memory_gib"], shaky[1]["memory_gib"] = 0.9, 1.0
    found = judged(shaky, gain="memory")
    assert found["verdict"] == "dropped" and "-5.0% memory (noise 10.5%)" in found["why"]


ABLATION = """
baseline: {set: {train.optim: adamw_torch}}
optimizations:
  - {name: a, kind: x, what: it, set: {data.padding_free: true}}
  - {name: b, kind: x, what: it, set: {speed.loss: chunked}}
  - {name: c, kind: x, what: it, set: {data.packing: true}, gate: held_out}
  - {name: d, kind: x, what: it, set: {speed.activation_checkpointing: none}}
  - {name: e, kind: x, what: it, set: {speed.fused: true}}
  - {name: f, kind: x, what: it, set: {train.adam_beta1: 0.8}, on: [a, b]}
  - {name: g, kind: x, what: it, set: {train.adam_beta2: 0.9}, on: [c]}
"""
GAINS = {
    "data.padding_free": 1.5,
    "speed.loss": 1.3,
    "data.packing": 0.5,
    "speed.activation_checkpointing": 1.3,
}
GAINS |= {"speed.fused": 0.97, "train.adam_beta1": 1.25, "train.adam_beta2": 1.5}


def made_up(monkeypatch: pytest.MonkeyPatch, fails: str = "none") -> dict[Path, float]:
    """Runs that are not made: the rates they will have, each 1 % below the last; one of them fails."""
    made, losses = dict[Path, float](), dict[Path, float]()

    def make(job: measured_run.RunCommand, *, cpu: bool) -> bool:
        keys = {text.partition("=")[0] for text in job.overrides if not text.endswith("=false")}
        gains = [gain for key, gain in GAINS.items() if set(key.split("+")) <= keys]
        made[job.folder] = 100 * 0.99 ** len(made) * math.prod(gains)
        losses[job.folder] = 1.04 if "data.packing" in keys else 1.0  # other rows meet
        return True

    def figures(folder: Path, warm_up: int) -> dict[str, Any]:
        one, here = runs(1.0, loss=losses[folder])[0], f"1 x {detection.detect().name}"
        if fails in f"{folder.parent.name} {folder.name}":
            return {"failed": "out of memory", "seconds": 1.0, "date": "2026-01-01"}
        one |= {"tokens_per_second": made[folder], "tokens_per_cpu_second": None, "tokens": 1000.0}
        return one | {"machine": {"hardware": here}, "seconds": 1.0, "date": "2026-01-01"}

    monkeypatch.setattr(measured_run, "make", make)
    monkeypatch.setattr(measured_run, "figures", figures)
    return made


@pytest.mark.parametrize(
    ("fails", "status"),
    [
        ("baseline-2", ["error"] * 4),
        ("a quickstart-again-3", ["kept", "error", "dropped", "kept"]),
        ("again", ["kept", "error", "error", "error"]),
        ("b quickstart-stacked-2", ["kept", "error", "dropped", "kept"]),
    ],
)
def test_a_repeat_that_fails_leaves_an_ablation(fails: str, status: list[str], tmp_path, monkeypatch) -> None:
    """Its optimization's row says so; what stands beside the next one is run again."""
    made_up(monkeypatch, fails)
    (tmp_path / "ablation.yaml").write_text(ABLATION.partition("  - {name: e")[0])
    one = bench()
    one.request = one.request._replace(folder=tmp_path)
    (tmp_path / "quickstart").mkdir()
    one.file = optimizations.read(tmp_path / "ablation.yaml")
    rows = ablation.begin(one)
    ablation.alone(one, rows)
    found = ablation.collect(one, rows, *ablation.stack(one, rows), 1.0)
    assert [row["status"] for row in rows] == status
    assert next(row["why"] for row in rows if row["status"] == "error").endswith("out of memory")
    assert found["speedup"] >= 1 and (tmp_path / "quickstart" / "ablation.json").exists()


def test_runs_take_turns_and_those_that_change_nothing_are_not_made(tmp_path, monkeypatch) -> None:
    """On a machine that slows down from run to run, by 1 %: on the stack gains are what they are."""
    made = made_up(monkeypatch)
    (tmp_path / "ablation.yaml").write_text(ABLATION)
    one = bench()
    one.file = optimizations.read(tmp_path / "ablation.yaml")
    rows = ablation.begin(one)
    ablation.alone(one, rows)
    first = [folder.name.removeprefix("quickstart-") for folder in made]
    once = [
        "baseline-1",
        *["alone-1"] * 6,
        "under-1",
        "alone-1",
        "alone-1",
    ]  # no optimization is a and b, where f stands
    assert first == [*once, "baseline-2", *["alone-2"] * 3]  # of b, d and e: the others are clear
    assert rows[5]["alone"]["speedup"] == pytest.approx(1.25 * 0.99)
    assert (
        rows[6]["alone"]["verdict"] == "kept"
    )  # its losses are those of what it stands on, not the baseline's
    kept = ablation.stack(one, rows)[1]
    names = [f"{folder.parent.name} {folder.name.removeprefix('quickstart-')}" for folder in made]
    turns = ["a again-2", "b stacked-2", "b stacked-3", "a again-3", "b again-4", "c stacked-1"]
    turns += ["b again-5", "d stacked-1", "d stacked-2", "b again-6", "d again-3", "e stacked-1"]
    turns += ["d again-4", "f stacked-1", "f stacked-2", "d again-5"]
    assert names[len(first) :] == turns and kept == ["a", "b", "d", "f"]
    for index, gain in ((1, 1.3), (3, 1.3), (5, 1.25)):
        assert rows[index]["stacked"]["speedup"] == pytest.approx(gain, rel=1e-3)
    assert [row["status"] for row in rows] == [
        *["kept", "kept", "dropped", "kept"],
        *["dropped", "kept", "dropped"],
    ]
    assert rows[2]["stacked"]["worse"] and "it needs c, which the stack does not have" in rows[6]["why"]


@pytest.mark.parametrize(
    ("alone", "stacked", "on", "kept", "expected"),
    [
        (0.8, 1.5, "", True, True),  # as fp8 products, where the GPU no longer waits for Python
        (0.8, 1.0, "", False, None),  # no reason to keep the recipe's own value out
        (1.0, 0.8, "", False, False),
        (0.8, 1.0, ", on: [c]", False, False),  # never stacked: what it did alone
    ],
)
def test_what_hurt_is_switched_off_in_the_best_recipe(
    alone: float, stacked: float, on: str, kept: bool, expected: bool | None, tmp_path, monkeypatch
) -> None:
    made_up(monkeypatch)
    monkeypatch.setitem(GAINS, "speed.fused", alone)
    monkeypatch.setitem(GAINS, "speed.fused+speed.activation_checkpointing", stacked / alone)
    text = ABLATION.replace("adamw_torch}", "adamw_torch, speed.fused: false}")
    (tmp_path / "ablation.yaml").write_text(text.replace("{speed.fused: true}", "{speed.fused: true}" + on))
    one = bench()
    one.file = optimizations.read(tmp_path / "ablation.yaml")
    rows = ablation.begin(one)
    ablation.alone(one, rows)
    variant, names = ablation.stack(one, rows)
    assert ("e" in names) == kept and ("stacked" in rows[4]) != bool(on)
    assert ablation.best_values(one, rows, variant).get("speed.fused") is expected


def test_noise_is_pooled_over_repeats() -> None:
    assert measured_run.noise([[100.0], [5.0]]) is None
    assert measured_run.noise([[99.0, 101.0], [990.0, 1010.0]]) == pytest.approx(0.01 * 2**0.5)


def test_ablate_writes_under_runs(monkeypatch) -> None:
    asked = list[ablation.AblationRequest]()
    monkeypatch.setattr(ablation, "run", lambda one, quiet: asked.append(one))
    assert (
        main.main(["ablate", str(QUICKSTART)]) == main.main(["ablate", str(QUICKSTART), "--output", "x"]) == 0
    )
    assert [one.folder for one in asked] == [Path("runs/ablate-quickstart"), Path("x")]
