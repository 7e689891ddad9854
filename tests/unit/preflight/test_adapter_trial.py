"""`check` lets PEFT try an adapter on the model without its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from finetune.adapters import attach
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import loading, module_lists
from finetune.preflight import adapter_trial, checker, choice_checks
from finetune.recipe import loader
from finetune.speed import lm_head_loss
from support.paths import MODEL, QUICKSTART

# An option that makes a trial necessary
TRIED = ["adapter.layers_pattern=layers", "adapter.layers_to_transform=[0]"]


@pytest.mark.parametrize("options", [["adapter.type=shira"], ["adapter.type=unilora"]])
def test_type_that_reads_the_weights_is_left_to_the_run(options: list[str]) -> None:
    recipe = loader.load(QUICKSTART, [*options, "adapter.r=4"])
    assert adapter_trial.check_on_meta(recipe, Path(recipe.model.name)) is None
    assert "only the run" in "\n".join(checker._trial(recipe))


def test_error_of_finetune_in_a_trial_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "attach", lambda *_, **__: [].pop())
    recipe = loader.load(QUICKSTART, TRIED)
    with pytest.raises(IndexError):
        adapter_trial.check_on_meta(recipe, Path(recipe.model.name))


@pytest.mark.parametrize("tried", [[], TRIED])
@pytest.mark.parametrize(("token", "refused"), [(4097, False), (4098, True), (-1, True)])
def test_rows_of_added_tokens_can_train(token: int, refused: bool, tried: list[str]) -> None:
    """The model has 4,096 rows, and two tokens are new."""
    recipe = loader.load(
        QUICKSTART, ["model.add_tokens=[<a>, <b>]", f"adapter.trainable_token_indices=[{token}]", *tried]
    )
    with contextlib.suppress(UserError) if refused else contextlib.nullcontext():
        notes = checker._adapter(recipe, checker._config(recipe.model)) + checker._trial(recipe)
        assert not refused and any("PEFT accepts" in note for note in notes) == bool(tried)
    model = loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
    with pytest.raises(UserError) if refused else contextlib.nullcontext():
        attach.attach(model, recipe.adapter, 20, RunChecks(), added=[4096, 4097])


Tensors = dict[str, torch.Tensor]
Q_PROJ = "base_model.model.model.layers.{}.self_attn.q_proj.lora_A.weight"
DAMAGES: dict[str, Callable[[Tensors], Tensors]] = {
    "lacks": lambda tensors: {name: one for name, one in tensors.items() if name != Q_PROJ.format(0)},
    "tensors that the adapter lacks": lambda tensors: {**tensors, Q_PROJ.format(99): torch.ones(2, 2)},
    "has 2 tensors that the adapter lacks": lambda tensors: {
        **tensors,
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 4096),
        "base_model.model.lm_head.lora_A.weight": torch.ones(2, 256),
    },
    "does not fit": lambda tensors: {**tensors, Q_PROJ.format(0): torch.ones(2, 5)},
    "NaN or Inf": lambda tensors: {
        **tensors,
        Q_PROJ.format(0): torch.full_like(tensors[Q_PROJ.format(0)], torch.nan),
    },
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # PEFT warns of what the test asks for
@pytest.mark.parametrize("refused", [None, *DAMAGES])
def test_tensors_of_an_adapter_to_continue_from_are_compared_with_the_model(
    refused: str | None, tmp_path: Path
) -> None:
    with torch.device("meta"):
        base = module_lists.build_without_weights(MODEL)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    tensors = {
        name.replace(".default", ""): torch.ones(parameter.shape)
        for name, parameter in adapted.named_parameters()
        if "lora_" in name
    }
    adapted.peft_config["default"].base_model_name_or_path = str(MODEL)
    adapted.peft_config["default"].save_pretrained(str(tmp_path))
    save_file(DAMAGES[refused](tensors) if refused else tensors, tmp_path / "adapter_model.safetensors")
    keys = ["adapter.r=2", "adapter.lora_alpha=8", "adapter.target_modules=[q_proj]"]
    recipe = loader.load(QUICKSTART, [*keys, f"adapter.init_from={tmp_path}", f"model.name={MODEL}"])
    if refused is None:
        assert "PEFT accepts" in "\n".join(checker.check(recipe))
        return
    with pytest.raises(UserError, match=refused) as of_check:
        checker.check(recipe)
    model = loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
    with pytest.raises(UserError, match=refused) as of_train:
        attach.attach(model, recipe.adapter, 20, RunChecks())
    assert str(of_check.value) == str(of_train.value)


@pytest.mark.parametrize("loss", ["chunked", "auto"])
@pytest.mark.parametrize(
    "options",
    [
        ["model.add_tokens=[<new>]"],
        ["adapter.modules_to_save=[embed_tokens, lm_head]"],
        ["adapter.trainable_token_indices=[5]"],
        ["adapter.modules_to_save=[norm]"],
    ],
)
def test_chunked_loss_of_a_head_that_peft_wraps_is_refused_as_in_training(
    options: list[str], loss: str, untied: Path
) -> None:
    recipe = loader.load(QUICKSTART, [*options, f"model.name={untied}", f"speed.loss={loss}"])
    model = loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
    adapted = attach.attach(
        model, recipe.adapter, 20, RunChecks(), added=[4096] if recipe.model.add_tokens else []
    )
    reason = lm_head_loss.head_unsupported_reason(lm_head_loss.base_model_of(adapted))
    assert bool(reason) == ("norm" not in options[0] and "indices" not in options[0])
    with pytest.raises(UserError) if reason and loss == "chunked" else contextlib.nullcontext() as raised:
        checker.check(recipe)
    assert raised is None or reason in str(raised.value)
