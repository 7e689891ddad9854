"""Wrong arguments of the Python API: one error with the argument and what it must be, for every function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import finetune
from finetune.cli import main
from finetune.core.errors import Exit, UserError
from support.paths import MODEL, QUICKSTART


class Hostile:
    """Raises whenever it is printed or used as a path."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __fspath__ = __str__


VALUES = (Hostile(), b"bytes", 1.5, {}, object(), [["a"]], print)
CALLS: dict[str, Callable[[Any], object]] = {
    "recipe of check": lambda value: finetune.check(value),
    "recipe of plan": lambda value: finetune.plan(value),
    "gpu": lambda value: finetune.plan(finetune.load_recipe(QUICKSTART), gpu=value),
    "gpus": lambda value: finetune.plan(finetune.load_recipe(QUICKSTART), gpu="h100", gpus=value),
    "path of load_recipe": lambda value: finetune.load_recipe(value),
    "overrides of load_recipe": lambda value: finetune.load_recipe(QUICKSTART, value),
    "an override": lambda value: finetune.load_recipe(QUICKSTART, [value]),
    "name of load_model": lambda value: finetune.load_model(value),
    "quantization": lambda value: finetune.load_model(MODEL, quantization=value),
    "revision": lambda value: finetune.load_model(MODEL, revision=value),
    "device": lambda value: finetune.load_model(MODEL, device=value),
    "recipe of train": lambda value: finetune.train(value),
    "callbacks": lambda value: finetune.train(finetune.load_recipe(QUICKSTART), callbacks=value),
    "a callback": lambda value: finetune.train(finetune.load_recipe(QUICKSTART), callbacks=[value]),
    "resume": lambda value: finetune.train(finetune.load_recipe(QUICKSTART), resume=value),
    "quiet": lambda value: finetune.train(finetune.load_recipe(QUICKSTART), quiet=value),
    "path of import_recipe": lambda value: finetune.import_recipe(value),
    "tool": lambda value: finetune.import_recipe(QUICKSTART, value),
    "gpus of import_recipe": lambda value: finetune.import_recipe(QUICKSTART, gpus=value),
    "run of evaluate": lambda value: finetune.evaluate(value),
    "overrides of evaluate": lambda value: finetune.evaluate("run", value),
    "run of merge": lambda value: finetune.merge(value),
    "output of merge": lambda value: finetune.merge("run", value),
    "quantize of merge": lambda value: finetune.merge("run", quantize=value),
    "run of export_model": lambda value: finetune.export_model(value, "vllm"),
    "to": lambda value: finetune.export_model("run", value),
    "output of export_model": lambda value: finetune.export_model("run", "vllm", value),
    "quantize of export_model": lambda value: finetune.export_model("run", "gguf", quantize=value),
    "adapter": lambda value: finetune.export_model("run", "vllm", adapter=value),
    "run of publish": lambda value: finetune.publish(value, dry_run=True),
    "overrides of publish": lambda value: finetune.publish("run", value, dry_run=True),
    "dry_run": lambda value: finetune.publish("run", dry_run=value),
    "folder of Run": lambda value: finetune.Run(value),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_a_wrong_type_are_errors_of_the_user(call: str) -> None:
    for value in VALUES:
        with pytest.raises(UserError) as raised:
            CALLS[call](value)
        assert raised.value.code == Exit.INPUT
        assert {problem.code for problem in raised.value.problems} == {"value-type"}, str(raised.value)


SIGNATURES: dict[str, Callable[..., object]] = {
    "load_model(name, quantization=..., revision=..., device=...)": finetune.load_model,
    "load_recipe(path, overrides)": finetune.load_recipe,
    "train(recipe, callbacks=..., resume=..., quiet=...)": finetune.train,
    "export_model(run, to, output, quantize=..., adapter=...)": finetune.export_model,
    "Run.load_model(self)": finetune.Run("run").load_model,
    "apply(model)": finetune.speed.apply,
    "remove(model)": finetune.speed.remove,
}


@pytest.mark.parametrize("expected", SIGNATURES)
def test_arguments_that_a_function_does_not_have_are_errors_of_the_user(expected: str) -> None:
    """The caller sees the arguments that it has."""
    for given, named in (((), {"bogus": 1}), (tuple(range(9)), {})):
        with pytest.raises(UserError, match="can't be called with these arguments") as raised:
            SIGNATURES[expected](*given, **named)
        (problem,) = raised.value.problems
        assert (problem.expected, problem.code, raised.value.code) == (expected, "value-type", Exit.INPUT)


def test_class_of_a_callback_in_place_of_an_instance_is_an_error_of_the_user() -> None:
    wrong: Any = TrainerCallback
    with pytest.raises(UserError, match="the class TrainerCallback"):
        finetune.train(finetune.load_recipe(QUICKSTART), callbacks=[TrainerCallback(), wrong])


PATHS: dict[str, Callable[[Any], object]] = {
    "load_recipe": finetune.load_recipe,
    "load_model": finetune.load_model,
    "import_recipe": finetune.import_recipe,
    "evaluate": finetune.evaluate,
    "merge": finetune.merge,
    "output of merge": lambda value: finetune.merge("run", value),
    "export_model": lambda value: finetune.export_model(value, "vllm"),
    "output of export_model": lambda value: finetune.export_model("run", "vllm", value),
    "publish": finetune.publish,
    "Run": finetune.Run,
}


@pytest.mark.parametrize("call", PATHS)
def test_texts_that_no_path_can_have_are_errors_of_the_user(call: str) -> None:
    for value in ("a\0b", "\ud800", Path("\0")):
        with pytest.raises(UserError, match="can't be a path") as raised:
            PATHS[call](value)
        assert raised.value.code == Exit.INPUT


CHOICES: dict[str, Callable[[Any], object]] = {
    "tool": lambda value: finetune.import_recipe(QUICKSTART, value),
    "quantize": lambda value: finetune.merge("run", quantize=value),
    "to": lambda value: finetune.export_model("run", value),
    "quantization": lambda value: finetune.load_model(MODEL, quantization=value),
    "gpu": lambda value: finetune.plan(finetune.load_recipe(QUICKSTART), gpu=value),
    "device": lambda value: finetune.load_model(MODEL, device=value or " "),
}


def test_device_that_this_machine_does_not_have_is_an_error_of_the_user() -> None:
    for device in ("cuda:99", "mps", "xpu:7"):
        with pytest.raises(UserError, match="no device of this machine"):
            finetune.load_model(MODEL, device=device)


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choices_are_errors_of_the_user(name: str) -> None:
    for value in ("", "x" * 1000, "a\nerror: forged", "\0"):
        with pytest.raises(UserError) as raised:
            CHOICES[name](value)
        assert raised.value.code == Exit.INPUT
        assert {problem.code for problem in raised.value.problems} == {"value-choice"}, str(raised.value)


def test_one_text_is_no_list_of_overrides() -> None:
    """Python would read each letter as an override."""
    with pytest.raises(UserError, match=r'pass a list such as \["adapter.r=8"\]'):
        finetune.load_recipe(QUICKSTART, "adapter.r=8")


@pytest.mark.parametrize("gpus", (0, -1, 10**7, 10**400))
def test_numbers_of_gpus_that_no_machine_has_are_refused(gpus: int) -> None:
    with pytest.raises(UserError, match="an integer from 1 to 1,000,000"):
        finetune.plan(finetune.load_recipe(QUICKSTART), gpu="h100", gpus=gpus)


def test_arguments_of_the_right_types_are_accepted(tmp_path: Path) -> None:
    loaded = finetune.load_recipe(str(QUICKSTART), ("train.max_steps=8",))
    assert loaded.train.max_steps == 8
    text: Any = str(tmp_path)
    assert finetune.Run(tmp_path).metrics == [] == finetune.Run(text).metrics
    assert finetune.Run(text).folder == tmp_path


def test_a_name_that_no_model_can_have_is_an_error_of_the_user() -> None:
    with pytest.raises(UserError, match="the argument `name` has a wrong value") as raised:
        finetune.load_model("x" * 100_000)
    assert raised.value.code == Exit.INPUT


@pytest.mark.parametrize("command", (["plan", str(QUICKSTART), "--gpu", "h100"], ["import", "absent.yaml"]))
def test_commands_refuse_such_a_number_too(command: list[str], capsys: Any) -> None:
    """A plan for 10**9 GPUs would take minutes."""
    try:
        code = main.main([*command, "--gpus", "1000000000"])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert "an integer from 1 to 1,000,000" in capsys.readouterr().err


@pytest.mark.parametrize("call", [finetune.check, finetune.plan, finetune.train])
def test_recipe_that_was_not_read_from_a_file_is_an_error_of_the_user(call: Callable[..., object]) -> None:
    """Its values were not checked."""
    values = {"model": {"name": str(MODEL)}, "data": {"name": "a.jsonl"}, "adapter": {"type": "lora"}}
    with pytest.raises(UserError, match="not read from a file") as raised:
        call(finetune.Recipe.model_validate(values))
    assert raised.value.code == Exit.INPUT


CHANGED = [("train", "learning_rate", -1.0), ("train", "max_steps", "2"), ("adapter", "r", 0)]


@pytest.mark.parametrize("call", [finetune.check, finetune.plan, finetune.train])
def test_copy_of_a_recipe_with_other_values_is_an_error_of_the_user(call: Callable[..., object]) -> None:
    recipe = finetune.load_recipe(QUICKSTART)
    for section, key, value in CHANGED:
        copied = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={key: value})})
        with pytest.raises(UserError, match="not read from a file"):
            call(copied)
    with pytest.raises(UserError, match="not read from a file"):
        call(recipe.model_copy(update={"model": None}))


def test_copy_of_a_recipe_with_the_same_values_is_checked() -> None:
    assert finetune.check(finetune.load_recipe(QUICKSTART).model_copy(deep=True))
