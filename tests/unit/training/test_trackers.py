"""`train.report_to`: nothing unless asked, a missing package known at once, and what a tracker is told."""

import os
from pathlib import Path

import pytest

from finetune.cli import main
from finetune.core import packages
from finetune.recipe import upstream_options
from support.paths import QUICKSTART
from support.runs import metrics


def test_nothing_is_reported_unless_asked(train) -> None:
    run = train("train.max_steps=1", "data.validation=null")
    assert run.read("environment.json")["sft_config"]["report_to"] == "[]"
    assert {path.name for path in run.path.iterdir()}.isdisjoint({"tensorboard", "wandb", "mlruns", "runs"})


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("comet_ml", 3, "pip install comet-ml"),
        ("[swanlab,clearml]", 3, "pip install swanlab clearml"),
        ("tensorbord", 2, "tensorboard"),
        ("null", 2, "train.report_to: none"),
    ],
)
def test_what_can_t_be_reported_to_is_said_at_once(asked: str, code: int, said: str, capsys) -> None:
    assert not any(packages.installed(name) for name in ("comet_ml", "swanlab", "clearml"))
    for command in ("check", "train"):
        assert main.main([command, str(QUICKSTART), f"train.report_to={asked}"]) == code
        error = capsys.readouterr().err
        assert "train.report_to" in error and said in error


@pytest.mark.parametrize("asked", ["tensorboard", "[tensorboard,mlflow]", "all"])
@pytest.mark.parametrize("where", ["nonsense://bucket/x", "gs://bucket/x"])
def test_a_folder_that_tensorboard_can_t_write_to(asked: str, where: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", where)
    monkeypatch.setattr(packages, "installed", lambda name: name in ("tensorboard", "mlflow"))
    for command in ("check", "train"):
        assert main.main([command, str(QUICKSTART), f"train.report_to={asked}"]) == 3
        error = capsys.readouterr().err
        assert "TensorBoard can't write to this place" in error and where in error


def test_a_remote_folder_of_tensorboard_is_told(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "memory://runs/x")
    assert main.main(["check", str(QUICKSTART), "train.report_to=tensorboard"]) == 0
    assert "TensorBoard writes to memory://runs/x" in capsys.readouterr().out


@pytest.mark.parametrize("asked", ["none", "[none]", "[]", "kubeflow"])
def test_what_needs_no_package(asked: str) -> None:
    assert main.main(["check", str(QUICKSTART), f"train.report_to={asked}"]) == 0


def test_all_says_which(capsys) -> None:
    assert main.main(["check", str(QUICKSTART), "train.report_to=all"]) == 0
    assert "train.report_to: all means the installed trackers: " in capsys.readouterr().out


def test_names_are_those_of_the_installed_transformers() -> None:
    assert upstream_options.trackers() >= {"tensorboard", "wandb", "mlflow", "trackio"}


def test_tensorboard_hears_training_evaluation_and_scores(train, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "")  # as if it were not set
    before = dict(os.environ)
    run = train(
        "train.report_to=tensorboard", "train.max_steps=3", "eval.eval_steps=2", "train.logging_steps=1"
    )
    heard = EventAccumulator(str(run.path / "tensorboard"))
    heard.Reload()

    def values(tag: str) -> list[tuple[int, float]]:
        return [(event.step, event.value) for event in heard.Scalars(tag)]

    lines = [line for line in metrics(run) if "loss" in line]
    for key in ("loss", "tokens_per_second", "host_memory_gib", "data_wait"):
        wanted = [(line["step"], pytest.approx(line[key], rel=1e-5)) for line in lines]
        assert values(f"train/{key}") == wanted
    evaluations = [line for line in metrics(run) if "eval_loss" in line]
    assert values("eval/loss") == [(e["step"], pytest.approx(e["eval_loss"], rel=1e-5)) for e in evaluations]
    scores = run.read("eval.json")
    assert values("eval/base_loss") == [(3, pytest.approx(scores["base"]["loss"], rel=1e-5))]
    assert values("eval/tuned_loss") == [(3, pytest.approx(scores["tuned"]["loss"], rel=1e-5))]
    assert dict(os.environ) == before and not Path("runs").exists()
