"""`finetune.train` from Python: its `Run`, its callbacks, and one run at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback, enable_full_determinism

import finetune
from finetune.core import library_calls, privacy, torch_settings
from finetune.core.errors import UserError
from finetune.run_folder.run_folder import RunFolder
from support.paths import QUICKSTART
from support.runs import run_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    assert dict(os.environ) == environment


@contextlib.contextmanager
def changed(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


def precision_of_products(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value


STATES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "none": contextlib.nullcontext,
    "dtype float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "dtype bfloat16": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "device": lambda: changed(torch.set_default_device, "meta", None),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "products in bf16": lambda: changed(torch.set_float32_matmul_precision, "medium", "highest"),
    "products in bf16 by backend": lambda: changed(precision_of_products, "bf16", "none"),
}


def state_of_torch() -> tuple[Any, ...]:
    precisions = [holder.fp32_precision for holder in torch_settings.holders(torch).values()]
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    return dtype, device, *modes, *precisions


def test_training_does_not_depend_on_the_settings_of_torch_in_the_program(small, tmp_path) -> None:
    losses = {}
    for name, state in STATES.items():
        options = ["train.max_steps=2", "eval.generate=false", "eval.forgetting=false"]
        options += [f"train.output_dir={tmp_path}/{name}", "train.logging_steps=1"]
        recipe = finetune.load_recipe(QUICKSTART, [*small, *options])
        with state():
            before = state_of_torch()
            run = finetune.train(recipe, quiet=True)
            assert state_of_torch() == before
        losses[name] = [line["loss"] for line in run.metrics if "loss" in line]
        losses[name].append(run.eval["base"]["loss"])
    assert all(found == losses["none"] for found in losses.values()), losses


def test_full_determinism_ends_with_the_call() -> None:
    environment = dict(os.environ)
    library_calls.library_call("tested")(lambda: enable_full_determinism(0))()
    assert not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == environment


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_older_settings_of_torch_can_be_read_inside_a_call(precision: str) -> None:
    """Callbacks and torch.compile read them. torch raises an error if only the newer ones are changed."""
    torch.set_float32_matmul_precision(precision)
    try:
        with torch_settings.usual():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "override", ["model.add_tokens=[<zz>]", "train.learning_rate=1", "data.chat_template=chatml"]
)
def test_evaluate_refuses_overrides_that_it_would_ignore(override: str, trained) -> None:
    with pytest.raises(UserError, match="`evaluate` does not use this key"):
        finetune.evaluate(trained().path, [override])


def test_a_call_inside_the_device_of_a_with_statement_is_refused(small, tmp_path) -> None:
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path}/run"])
    with pytest.raises(UserError, match=r"can't run inside `with torch.device"), torch.device("meta"):
        finetune.train(recipe, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("switched_on", [False, True])
def test_api_sends_no_telemetry_unless_it_is_switched_on(
    switched_on, small, tmp_path, hub, monkeypatch
) -> None:
    """Also if the program has imported huggingface_hub before finetune switches it off."""
    monkeypatch.delenv("CI", raising=False)  # TRL sends nothing if it is set
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", False)
    for name in privacy.SWITCHES:
        monkeypatch.setenv(name, "0") if switched_on else monkeypatch.delenv(name, raising=False)
    options = ["train.max_steps=1", "train.warmup_steps=0", "eval.generate=false", "eval.forgetting=false"]
    recipe = finetune.load_recipe(QUICKSTART, [*small, *options, f"train.output_dir={tmp_path / 'run'}"])
    finetune.train(recipe, quiet=True)
    until = time.monotonic() + 10  # a thread of the library sends it
    while switched_on and not hub.asked("telemetry") and time.monotonic() < until:
        time.sleep(0.05)
    assert bool(hub.asked("telemetry")) == switched_on, hub.requests
    assert switched_on or not any(name in os.environ for name in privacy.SWITCHES), "as it was"


class Ends(TrainerCallback):
    """End the training in one hook, after the first step."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.end)

    def end(self, args, state, control, **kwargs: object) -> None:
        control.should_training_stop = state.global_step > 0
        control.should_epoch_stop = control.should_training_stop  # many callbacks set both


@pytest.mark.parametrize("hook", ["on_step_end", "on_log", "on_epoch_end"])
def test_a_callback_may_end_the_training(small, tmp_path, hook) -> None:
    steps = ["train.max_steps=40", "eval.eval_steps=15", f"train.output_dir={tmp_path / 'run'}"]
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, *steps])
    run = finetune.train(recipe, callbacks=[Ends(hook)], quiet=True)
    ended = run_checks(RunFolder(run.folder))["steps"]
    assert ended["passed"] and ended["expected"] == "at most 40, with a callback"
    assert 0 < run.metrics[-1]["step"] < 40 and (run.folder / "adapter/adapter_model.safetensors").is_file()
    assert run.eval["tuned"]["loss"] > 0


class LeavesEvaluationMode(TrainerCallback):
    def on_step_end(self, args, state, control, model: Any = None, **kwargs: object) -> None:
        model.eval()  # to generate, for example


class AddsAnAdapter(TrainerCallback):
    def on_step_end(self, args, state, control, model: Any = None, **kwargs: object) -> None:
        if "other" not in model.peft_config:
            model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
            model.set_adapter("other")


def test_a_callback_may_leave_the_model_in_evaluation_mode(small, tmp_path) -> None:
    """transformers sets the mode before each step, and TRL logs by the mode after the callbacks."""
    options = [*small, *SHORT, "train.logging_steps=1"]
    recipes = [
        finetune.load_recipe(QUICKSTART, [*options, f"train.output_dir={tmp_path / name}"])
        for name in ("own", "left")
    ]
    own = finetune.train(recipes[0], quiet=True)
    left = finetune.train(recipes[1], callbacks=[LeavesEvaluationMode()], quiet=True)
    assert [line["loss"] for line in own.metrics] == [line["loss"] for line in left.metrics]


def test_a_callback_that_trains_another_adapter_fails_a_run_check(small, tmp_path) -> None:
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError, match="trainable parameters: a run check failed"):
        finetune.train(recipe, callbacks=[AddsAnAdapter()], quiet=True)


class Fails(TrainerCallback):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_step_end(self, args, state, control, **kwargs: object) -> object:
        if self.fault == "evaluation":
            control.should_evaluate = True
        elif self.fault == "epoch":
            control.should_epoch_stop = True
        elif self.fault == "returns":
            return 5
        elif self.fault == "own":
            raise ValueError("the sensor is gone")
        elif self.fault == "upstream":
            torch.zeros(2) @ torch.zeros(3)
        else:
            raise Silent
        return None


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("evaluation", ""),
        ("epoch", ""),
        ("returns", "int"),
        ("own", "ValueError: the sensor is gone"),
        ("upstream", "RuntimeError: inconsistent tensor size"),
        ("silent", "RuntimeError:"),
    ],
)
def test_a_fault_of_a_callback_is_named_as_the_callers_own(small, tmp_path, fault, found) -> None:
    recipe = finetune.load_recipe(QUICKSTART, [*small, *SHORT, f"train.output_dir={tmp_path / 'run'}"])
    with pytest.raises(UserError) as raised:
        finetune.train(recipe, callbacks=[Fails(fault)], quiet=True)
    (problem,) = raised.value.problems
    assert problem.code == "your-code" and problem.found.startswith(found)
    assert "--debug" not in str(raised.value)
    if fault in ("own", "upstream", "silent"):
        assert problem.where.startswith(__file__)


def test_a_run_without_an_evaluation_is_an_error_of_the_user(tmp_path) -> None:
    run = finetune.Run(tmp_path)
    assert run.metrics == []
    for read in (lambda: run.eval, run.load_model):
        with pytest.raises(UserError):
            read()
    with pytest.raises(UserError, match=r"help: +run `finetune evaluate RUN`"):
        _ = run.eval


def _as_a_link(run: Path) -> None:
    (run / "adapter").rename(run.parent / "elsewhere")
    (run / "adapter").symlink_to(run.parent / "elsewhere")


def _of_another_base(run: Path) -> None:
    config = json.loads((path := run / "adapter" / "adapter_config.json").read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": "other/model"}))


def _as_a_pickle(run: Path) -> None:
    (run / "adapter" / "adapter_model.safetensors").unlink()
    (run / "adapter" / "adapter_model.bin").write_bytes(b"a pickle")


@pytest.mark.parametrize("change", [_as_a_link, _of_another_base, _as_a_pickle])
def test_load_model_refuses_what_the_commands_refuse(change, trained) -> None:
    run = trained()
    change(run.path)
    with pytest.raises(UserError) as raised:
        finetune.Run(run.path).load_model()
    assert raised.value.problems[0].code in ("unsafe-file", "run-damaged", "adapter-files")


def test_changed_base_model_warns_in_load_model_and_ends_init_from(trained, two_layers, tmp_path) -> None:
    shutil.copytree(two_layers, base := tmp_path / "base")
    run = trained("lora", f"model.name={base}")
    config = json.loads((path := base / "config.json").read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.warns(UserWarning, match=r"the base model has changed since the run: rms_norm_eps"):
        finetune.Run(run.path).load_model()
    (tmp_path / "latest").symlink_to(run.path / "adapter")
    for name in (run.path, run.path / "adapter", tmp_path / "latest"):
        options = [f"model.name={base}", f"adapter.init_from={name}"]
        with pytest.raises(UserError, match="the base model has changed since the run: rms_norm_eps"):
            finetune.check(finetune.load_recipe(QUICKSTART, options))
    finetune.check(finetune.load_recipe(QUICKSTART, [*options, "adapter.from_other_base=true"]))
