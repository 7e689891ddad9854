"""`check` lets PEFT try an adapter on the model without its weights."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from finetune.adapters import attach
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import loading
from finetune.preflight import adapter_trial, checker, choice_checks
from finetune.recipe import loader
from support.paths import QUICKSTART

# An option that makes a trial necessary
TRIED = ["adapter.layers_pattern=layers", "adapter.layers_to_transform=[0]"]


@pytest.mark.parametrize("options", [["adapter.type=shira"], ["adapter.type=unilora"]])
def test_type_that_reads_the_weights_is_left_to_the_run(options: list[str]) -> None:
    recipe = loader.load(QUICKSTART, [*options, "adapter.r=4"])
    assert adapter_trial.problems(recipe, Path(recipe.model.name)) is None
    assert "only the run" in "\n".join(checker._trial(recipe))


def test_error_of_finetune_in_a_trial_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "attach", lambda *_, **__: [].pop())
    recipe = loader.load(QUICKSTART, TRIED)
    with pytest.raises(IndexError):
        adapter_trial.problems(recipe, Path(recipe.model.name))


@pytest.mark.parametrize("tried", [[], TRIED])
@pytest.mark.parametrize(("token", "refused"), [(4097, False), (4098, True), (-1, True)])
def test_rows_of_added_tokens_can_train(token: int, refused: bool, tried: list[str]) -> None:
    """The model has 4,096 rows, and two tokens are new."""
    recipe = loader.load(
        QUICKSTART, ["model.add_tokens=[<a>, <b>]", f"adapter.trainable_token_indices=[{token}]", *tried]
    )
    with contextlib.suppress(UserError) if refused else contextlib.nullcontext():
        notes = checker._adapter(recipe) + checker._trial(recipe)
        assert not refused and any("PEFT accepts" in note for note in notes) == bool(tried)
    model = loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
    with pytest.raises(UserError) if refused else contextlib.nullcontext():
        attach.attach(model, recipe.adapter, 20, RunChecks(), added=[4096, 4097])
