"""scripts/validate_optimizations.py: what is compared, and what is not; the whole in test_ablate.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.experiments.ablation import ab_test
from finetune.experiments.runner import measured_run
from finetune.recipe import loader
from support.paths import QUICKSTART, ROOT
from support.scripts import module_of


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3", "--warm-up", "5"], "--warm-up below --steps"),
        (["--optimized", "recipes/quickstrat.yaml"], "recipes/quickstart.yaml"),
        (["--optimized", str(QUICKSTART), "--accelerate", "ddp_three"], "no such accelerate config"),
        (["--optimized", str(QUICKSTART), "train.optim=nonsense"], "train.optim"),
        (["--optimized", "saves"], "NOT COMPARABLE"),
        (["--optimized", "saves"], "checkpoints: auto against steps 2"),
        (["--optimized", "other"], "examples/other_model"),
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
    words = [str(tmp_path / word) if word in ("saves", "other") else word for word in words]
    script = module_of("scripts", "validate_optimizations")
    given = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1", *words]
    assert script.main(given) == 2
    assert said in capsys.readouterr().err


def test_a_model_is_the_same_by_whatever_path(tmp_path) -> None:
    """The best recipe that `ablate` and `sweep` write names it by its whole path."""
    best = tmp_path / "best.yaml"
    best.write_text(QUICKSTART.read_text().replace(": examples/", f": {ROOT}/examples/"))
    assert str(loader.load(best).model.name) != str(loader.load(QUICKSTART).model.name)
    ab_test.look(ab_test.Asked(str(QUICKSTART), str(best), [], (None, None), tmp_path))


def test_a_launch_for_gpus_that_are_not_here_is_exit_3(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(measured_run, "make", lambda *_, **__: pytest.fail("a run began"))
    script = module_of("scripts", "validate_optimizations")
    given = ["--baseline", str(QUICKSTART), "--optimized", str(QUICKSTART), "--min-speedup", "1"]
    assert script.main([*given, "--accelerate", "ddp_2", "--output", str(tmp_path)]) == 3
    assert "no GPU is visible here" in capsys.readouterr().err


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
    measured_run.make(measured_run.Job(str(QUICKSTART), [], tmp_path / "run"), cpu=False)
    assert told[0]["CUDA_VISIBLE_DEVICES"] == seen


def test_runs_of_an_ab_test_are_of_one_machine_and_model(tmp_path) -> None:
    """Every run, not only the first of each side."""
    one = {"tokens_per_second": 1.0, "failed": "", "machine": {"torch": "2"}}
    asked = ab_test.Asked(str(QUICKSTART), str(QUICKSTART), [], (None, None), tmp_path)
    found = iter([one, one, {**one, "machine": {"torch": "1"}}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_run, "make", lambda *_, **__: False)
        patch.setattr(measured_run, "figures", lambda *_: next(found))
        with pytest.raises(UserError, match=r"NOT COMPARABLE.*\n.*torch: 2 against 1") as raised:
            ab_test.measure(asked, loader.load(QUICKSTART), tmp_path, Console(quiet=True))
    assert raised.value.code == 2 and next(found, None) is None


def test_a_lower_loss_is_no_failure() -> None:
    one = {"step_seconds": 1.0, "first_step_seconds": 1.0, "mfu": None, "memory_gib": 1.0, "losses": [1.0]}
    one |= {"tokens_per_cpu_second": None, "failed": ""}
    sides = [
        measured_run.summary([one | {"tokens_per_second": rate, "held_out": loss}])
        for rate, loss in ((1.0, 1.0), (2.0, 0.5))
    ]
    assert all(check.ok for check in ab_test.judge(sides, ab_test.Limits(1, 0.005)))
    assert not all(check.ok for check in ab_test.judge(sides[::-1], ab_test.Limits(0, 0.005)))
    sides[1]["held_out"] = float("nan")
    assert not all(check.ok for check in ab_test.judge(sides, ab_test.Limits(1, 0.005)))
