"""Every shipped recipe with every adapter type: valid, or refused by the one key that stands in the way."""

from __future__ import annotations

import pytest

from finetune.cli import main
from finetune.core import shipped_files
from support.adapters import ADAPTERS
from support.runs import run_checks
from support.soak import soak_except

RECIPES = shipped_files.recipes()
CELLS = [(name, kind) for name in RECIPES for kind in ADAPTERS]
EXPERTS = ("qwen3_30b_a3b/", "gpt_oss_20b/")  # recipes that adapt experts, which the model here lacks
# But for those that need a GPU, and those that train twenty steps as they are (test_loss_curves.py)
LEFT_OUT = ("gpus/", "isc25/", "llama3_8b/", "adapters/", *EXPERTS)
TRAINED = [name for name in RECIPES if not name.startswith(LEFT_OUT)]
EACH_CHANGE = ["quickstart", "llama3_1b/dora", "mistral_7b/adalora", "qwen3_8b/full", "qwen3_8b/qlora"]


@pytest.mark.parametrize(("name", "kind"), soak_except(CELLS[::4], CELLS))
def test_an_adapter_swapped_into_a_recipe_is_checked_on_the_model_itself(
    name: str, kind: str, small, two_layers, capsys
) -> None:
    """Names of modules and shapes too, for the model is there. A stated base may be none for the type."""
    words = ["check", str(RECIPES[name]), f"adapter.type={kind}", f"model.name={two_layers}", *small]
    words += [
        "model.revision=null",
        "model.attention=auto",
        "train.effective_batch_size=4",  # 96 short examples are packed into six
        "train.per_device_train_batch_size=1",
    ]
    words += ["adapter.target_modules=all-linear"] * name.startswith(EXPERTS)
    code = main.main(words)
    said = capsys.readouterr().err
    assert code == 0 or said.startswith("error: model.quantization: "), said
    if code:
        assert "  help: " in said and main.main([*words, "model.quantization=auto"]) == 0, (
            capsys.readouterr().err
        )


def test_each_recipe_and_each_type_is_among_the_cells_of_make_test() -> None:
    assert {name for name, _ in CELLS[::4]} == {*RECIPES} and {kind for _, kind in CELLS[::4]} == {*ADAPTERS}


@pytest.mark.parametrize("name", soak_except(EACH_CHANGE, TRAINED))
def test_a_recipe_trains_two_steps_with_another_adapter(name: str, train) -> None:
    """Each with the next type in turn."""
    given = [f"adapter.type={ADAPTERS[TRAINED.index(name) % len(ADAPTERS)]}", "model.quantization=auto"]
    given += ["model.revision=null", "data.max_length=256", "eval.generate=false"]
    given += ["train.effective_batch_size=2", "train.per_device_train_batch_size=1"]
    run = train(*given, recipe=RECIPES[name])
    assert all(check["passed"] for check in run_checks(run).values())
