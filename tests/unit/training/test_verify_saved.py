"""Weights that are not what was trained are moved aside, so that nothing takes them for a finished run."""

import json
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import evaluator, lm_eval_harness
from finetune.models import loading
from finetune.run_folder.run_folder import RunFolder
from finetune.training import saved_evaluation


def test_weights_that_do_not_verify_are_moved_aside(train, monkeypatch, capsys) -> None:
    """An adapter that was saved wrong is exit 4, and nothing takes the folder for a finished run."""
    from peft import PeftModel
    from safetensors.torch import save_file

    original = PeftModel.save_pretrained

    def broken(self, folder, **options):
        original(self, folder, **options)
        path = f"{folder}/adapter_model.safetensors"
        tensors = load_file(path)
        tensors[next(iter(tensors))] += 1e-3
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(PeftModel, "save_pretrained", broken)
    run = train(code=4)
    assert "saved tensors" in capsys.readouterr().err
    assert not run.adapter.exists() and (run.path / "adapter.unverified").exists()
    assert main.main(["evaluate", str(run.path)]) == 2
    assert "saved tensors" in (run.path / "log.txt").read_text()


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.AcceleratorError]
)
def test_weights_stay_where_memory_or_a_device_fails(error: Any, trained, monkeypatch) -> None:
    run = trained()
    monkeypatch.setattr(loading, "load", Mock(side_effect=error))
    with pytest.raises(RuntimeError):
        saved_evaluation.evaluate_here(cast("Any", None), run, RunChecks())
    assert run.finished


@pytest.mark.parametrize(("wrong", "code"), [("adapter", 4), ("task file", 2)])
def test_weights_that_don_t_open_are_moved_aside(wrong: str, code: int, trained, monkeypatch) -> None:
    """And not where the evaluation could not begin for another reason."""
    run = trained()
    if wrong == "adapter":
        config = run.adapter / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": 4}))
    else:
        monkeypatch.setattr(lm_eval_harness, "check", Mock(side_effect=UserError("no such task")))
    with pytest.raises(UserError) as raised:
        saved_evaluation.evaluate_here(cast("Any", None), run, RunChecks())
    assert raised.value.code == code and run.finished is (wrong == "task file")
    said = str(raised.value)
    named = f"can't load the saved weights ({run.adapter})" in said
    assert ("size mismatch" in said and named) is (wrong == "adapter")
    assert (run.path / "adapter.unverified" / "eval.json").is_file() is (wrong == "adapter")


def test_weights_that_are_not_the_best_are_moved_aside(tmp_path, monkeypatch) -> None:
    """With what they scored; as in an earlier life of the run."""
    folder, checks = RunFolder(tmp_path), RunChecks()
    setup = SimpleNamespace(launch=SimpleNamespace(processes=1))
    (tmp_path / "adapter.unverified" / "eval.json").mkdir(parents=True)
    folder.adapter.mkdir()
    folder.write("eval.json", {})
    monkeypatch.setattr(evaluator, "run", lambda *given, **more: {"tuned": {"loss": 2.0}})
    best = SimpleNamespace(
        add_run_check=lambda loss, checks: checks.add("best weights saved", 1.0, loss, "-")
    )
    recipe = SimpleNamespace(model=None)
    run: Any = SimpleNamespace(folder=folder, checks=checks, setup=setup, recipe=recipe)
    live, validations = cast("Any", None), cast("Any", [best])
    with pytest.raises(UserError, match="best weights saved"):
        saved_evaluation.reopen_and_evaluate(run, live, validations)
    assert not folder.finished and (tmp_path / "adapter.unverified" / "eval.json").is_file()
