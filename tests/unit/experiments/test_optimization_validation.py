"""scripts/validate_optimizations.py: what is compared, and what is not; the whole in test_ablate.py."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from finetune.core.errors import UserError
from finetune.experiments.ablation import optimizations
from finetune.experiments.runner import measured_run
from finetune.recipe import loader
from support.paths import QUICKSTART, ROOT
from support.scripts import module_of

LENGTH = {"steps": 3, "warm_up": 1, "repeats": 1, "accelerate": None, "baseline_accelerate": None}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3", "--warm-up", "5"], "--warm-up below --steps"),
        (["--optimized", "recipes/quickstrat.yaml"], "recipes/quickstart.yaml"),
        (["--optimized", str(QUICKSTART), "--accelerate", "ddp_three"], "can't find this accelerate config"),
        (["--optimized", str(QUICKSTART), "train.optim=nonsense"], "train.optim"),
        (["--optimized", "saves"], "NOT COMPARABLE"),
        (["--optimized", "saves"], "checkpoints: auto against steps 2"),
        (["--optimized", "other"], "examples/other_model"),
        (["--optimized", "elsewhere"], "data: "),
    ],
)
def test_a_wrong_comparison_ends_before_it_begins(
    words: list[str], said: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    text, model = QUICKSTART.read_text(), ROOT / "examples" / "tiny_llama" / "model"
    (tmp_path / "saves").write_text(text.replace("train:\n", "train:\n  save_steps: 2\n"))
    shutil.copytree(model, tmp_path / "examples" / "other_model")
    (tmp_path / "other").write_text(text.replace("examples/tiny_llama/model", "examples/other_model"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join((ROOT / "examples/tiny_llama/data/train.jsonl").read_text().splitlines(keepends=True)[:50])
    )
    named = text.replace("examples/tiny_llama/data/train.jsonl", str(rows))
    (tmp_path / "elsewhere").write_text(named.replace(": examples/", f": {ROOT}/examples/"))
    words = [str(tmp_path / word) if word in ("saves", "other", "elsewhere") else word for word in words]
    script = module_of("scripts", "validate_optimizations")
    given = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1", *words]
    assert script.main(given) == 2
    assert said in capsys.readouterr().err


def test_a_model_is_the_same_by_whatever_path(tmp_path) -> None:
    """The best recipe that `ablate` and `sweep` write names it by its whole path."""
    best = tmp_path / "best.yaml"
    best.write_text(QUICKSTART.read_text().replace(": examples/", f": {ROOT}/examples/"))
    assert str(loader.load(best).model.name) != str(loader.load(QUICKSTART).model.name)
    script, recipes = (
        module_of("scripts", "validate_optimizations"),
        [loader.load(QUICKSTART), loader.load(best)],
    )
    options = argparse.Namespace(baseline=str(QUICKSTART), optimized=str(best), overrides=[], **LENGTH)
    script.check_comparable(options, recipes)
    assert script.two_rows(options, *recipes)["baseline"]["set"] == {}


def test_two_rows_are_the_keys_in_which_the_recipes_differ(tmp_path) -> None:
    """The file reads as an ablation's; the baseline's values are what the optimized recipe is without."""
    script, base = (
        module_of("scripts", "validate_optimizations"),
        ROOT / "recipes" / "baselines" / "quickstart.yaml",
    )
    more = {"accelerate": "cpu_2", "baseline_accelerate": "cpu"}
    options = argparse.Namespace(
        baseline=str(base), optimized=str(QUICKSTART), overrides=[], **{**LENGTH, **more}
    )
    recipes = [loader.load(base), loader.load(QUICKSTART)]
    file = tmp_path / "two_rows.yaml"
    file.write_text(json.dumps(script.two_rows(options, *recipes)))
    settings = optimizations.read(file)
    before = optimizations.baseline(settings)
    assert before.accelerate == "cpu" and optimizations.configs(settings) == ["cpu_2", "cpu"]
    assert optimizations.add(before, settings.optimization("optimized")) == optimizations.Variant(None, {})
    made = script.values_of(loader.load(QUICKSTART, before.overrides))
    expected = script.values_of(recipes[0])
    assert {key for key in made if made[key] != expected[key]} <= {*script.SHARED, "eval.samples"}


def test_a_key_of_the_optimized_recipe_alone_must_be_stated_in_the_baseline() -> None:
    script = module_of("scripts", "validate_optimizations")
    options = argparse.Namespace(baseline=str(QUICKSTART), optimized=str(QUICKSTART), overrides=[], **LENGTH)
    recipes = [loader.load(QUICKSTART), loader.load(QUICKSTART, ["train.optim=adamw_torch"])]
    with pytest.raises(UserError, match=r"only the optimized recipe sets this key[^\n]*quickstart.yaml"):
        script.two_rows(options, *recipes)


def test_a_launch_for_gpus_that_are_not_here_is_exit_3(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    script = module_of("scripts", "validate_optimizations")
    given = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1"]
    assert script.main([*given, "--accelerate", "ddp_2", "--output", str(tmp_path)]) == 3
    assert "no GPU is visible" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "seen"), [(None, "0"), ("2,3", "2"), ("", "")])
def test_a_run_without_a_launch_has_one_gpu(given: str | None, seen: str, tmp_path, monkeypatch) -> None:
    """However many a scheduler has given: it would start on all of them."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    told: list[dict[str, str]] = []

    def start(words: list[str], log: str, environment: dict[str, str], **_: bool) -> int:
        told.append(environment)
        Path(log).touch()
        return 1

    monkeypatch.setattr(measured_run, "start", start)
    measured_run.make(measured_run.RunCommand(str(QUICKSTART), [], tmp_path / "run"), cpu=False)
    assert told[0]["CUDA_VISIBLE_DEVICES"] == seen


def test_a_lower_loss_is_no_failure() -> None:
    one = {"step_seconds": 1.0, "first_step_seconds": 1.0, "mfu": None, "memory_gib": 1.0, "losses": [1.0]}
    one |= {"tokens_per_cpu_second": None, "failed": ""}
    sides = [
        measured_run.summary([one | {"tokens_per_second": rate, "held_out": loss}])
        for rate, loss in ((1.0, 1.0), (2.0, 0.5))
    ]
    script = module_of("scripts", "validate_optimizations")
    options = argparse.Namespace(min_speedup=1, max_loss_delta=(0.005, True), max_memory_gib=None)
    assert all(check.ok for check in script.compare(sides, options))
    slower = argparse.Namespace(min_speedup=0, max_loss_delta=(0.005, True), max_memory_gib=None)
    assert not all(check.ok for check in script.compare(sides[::-1], slower))
    sides[1]["held_out"] = float("nan")
    assert not all(check.ok for check in script.compare(sides, options))


@pytest.mark.parametrize(("status", "code"), [("refused", 2), ("NOT COMPARABLE", 2), ("error", 5)])
def test_an_optimized_recipe_without_figures_is_an_error(status: str, code: int) -> None:
    script = module_of("scripts", "validate_optimizations")
    with pytest.raises(UserError, match=rf"{status} \[experiment\]\n.*the reason") as raised:
        found = {"optimizations": [{"status": status, "why": "the reason"}]}
        script.check_limits(found, argparse.Namespace(optimized="fast.yaml"))
    assert raised.value.code == code
