"""`finetune.train` from Python: its `Run`, its callbacks, and one run at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import finetune
from finetune.core import privacy
from finetune.core.errors import UserError
from finetune.run_folder.run_folder import RunFolder
from support.paths import QUICKSTART
from support.runs import run_checks

SHORT = ["train.max_steps=2", "train.warmup_steps=0", "eval.generate=false", "eval.forgetting=false"]


class SecondRun(TrainerCallback):
    """Starts another run in another thread while the first one trains."""

    def __init__(self, recipe: finetune.Recipe) -> None:
        self.recipe, self.steps, self.error = recipe, 0, ""

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            thread = threading.Thread(target=self.start)
            thread.start()
            thread.join()

    def start(self) -> None:
        try:
            finetune.train(self.recipe, quiet=True)
        except UserError as error:
            self.error = str(error)


def test_train_returns_a_run_and_refuses_a_second_one_meanwhile(small, tmp_path, capsys) -> None:
    recipes = [
        finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path / name}"])
        for name in ("first", "second")
    ]
    second = SecondRun(recipes[1])
    environment = dict(os.environ)
    run = finetune.train(recipes[0], callbacks=[second], quiet=True)
    assert "already trains a run" in second.error and not (tmp_path / "second").exists()
    assert second.steps == 2 and [line["step"] for line in run.metrics][-1] == 2
    assert run.folder == tmp_path / "first" and run.eval["tuned"]["loss"] > 0
    model, tokens = run.load_model(), torch.tensor([[1, 2, 3]])
    assert not model.training and torch.isfinite(model(input_ids=tokens).logits).all()
    assert capsys.readouterr().out == ""
    assert dict(os.environ) == {**privacy.SWITCHES, **environment}  # telemetry stays off


class StopsAfterStep1(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def test_a_run_that_a_callback_ends_is_saved_and_evaluated(small, tmp_path) -> None:
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path / 'run'}"])
    run = finetune.train(recipe, callbacks=[StopsAfterStep1()], quiet=True)
    steps = run_checks(RunFolder(run.folder))["steps"]
    assert steps["actual"] == "1, stopped early: a callback ended the training"
    assert (run.folder / "adapter" / "adapter_model.safetensors").exists() and run.eval["tuned"]["loss"] > 0


class Fails(TrainerCallback):
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("boom")


def test_an_exception_of_a_callback_is_an_error_of_the_users_code(small, tmp_path) -> None:
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="your code failed while finetune trained the model") as raised:
        finetune.train(recipe, callbacks=[Fails()], quiet=True)
    said = str(raised.value)
    assert f"{Path(__file__).name}:" in said and "ValueError: boom" in said and "--debug" not in said


def test_a_run_without_an_evaluation_is_an_error_of_the_user(tmp_path) -> None:
    run = finetune.Run(tmp_path)
    assert run.metrics == []
    for read in (lambda: run.eval, run.load_model):
        with pytest.raises(UserError):
            read()
