"""The end of a run whose base no single GPU holds: what was saved is compared from the files."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from finetune.adapters import trainable_parameters
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.evaluation import reopen
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder
from finetune.training import saved_evaluation, verify_saved


def live_of(model: Any, shapes: dict[str, Any]) -> verify_saved.Live:
    return verify_saved.Live(verify_saved.hashes(model, shapes), shapes, [], [], "", 0.0)


@pytest.mark.soak
def test_a_base_that_no_gpu_holds_is_evaluated_apart(train, tmp_path, monkeypatch) -> None:
    """What was saved is compared from the file, and the evaluation is a process outside the launch."""
    run = train("adapter.type=dora")
    opened = reopen.reopen(run, run_folder.recipe_of(run))
    shapes = {name: p.shape for name, p in opened.named_parameters() if "lora_" in name}
    live = live_of(opened, shapes)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "ACCELERATE_USE_FSDP": "true"}.items():
        monkeypatch.setenv(name, value)
    assert (
        not {"RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP"} & saved_evaluation.alone().keys()
        and "PATH" in saved_evaluation.alone()
    )
    before, checks = run.read("eval.json"), RunChecks()
    (run.path / "eval.json").unlink()
    made = saved_evaluation.evaluate_in_new_process(run, live, checks)
    assert made["tuned"]["loss"] == pytest.approx(before["tuned"]["loss"]) and len(shapes) == 42
    assert checks.entries[-1].actual == f"all {len(shapes)}"
    other = run_folder.RunFolder(shutil.copytree(run.path, tmp_path / "other"))
    path = run.adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, path)
    with pytest.raises(UserError, match="saved tensors") as raised:
        saved_evaluation.evaluate_in_new_process(run, live, RunChecks())
    assert raised.value.code == 4 and not run.adapter.exists()
    config = other.adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "r": 3}))
    with pytest.raises(UserError, match="the saved weights can't be loaded") as raised:
        saved_evaluation.evaluate_in_new_process(other, live, RunChecks())
    assert raised.value.code == 4 and not other.adapter.exists()


@pytest.mark.parametrize(
    "given",
    [["adapter.type=ia3"], ["adapter.type=vera"], ["model.add_tokens=[<one>, <two>]"]],
    ids=["ia3", "vera", "tokens"],
)
def test_names_of_every_kind_are_found_in_the_file(given: list[str], train) -> None:
    run, checks = train(*given), RunChecks()
    opened = reopen.reopen(run, run_folder.recipe_of(run))
    trained = ("ia3_", "vera_lambda", "lora_", "trainable_tokens_delta")
    shapes = {name: p.shape for name, p in opened.named_parameters() if any(part in name for part in trained)}
    shapes = {name: shape for name, shape in shapes.items() if ".default" in name}
    verify_saved.add_saved_checks(live_of(opened, shapes), run, checks)
    assert checks.entries[-1].passed and checks.entries[-1].actual == f"all {len(shapes)}" and shapes


def test_experts_are_stored_under_other_names(tmp_path) -> None:
    """By transformers: all are compared, as it reads them."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 40, "num_local_experts": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    run, checks = RunFolder(tmp_path), RunChecks()
    model.save_pretrained(run.model)
    live = live_of(model, {name: p.shape for name, p in trainable_parameters.trainable(model).items()})
    verify_saved.add_saved_checks(live, run, checks)
    assert checks.entries[-1].passed and checks.entries[-1].actual == f"all {len(live.tensors)}"
    path = run.model / "model.safetensors"
    tensors = load_file(path)
    assert not tensors.keys() >= live.tensors.keys()
    for name in ("model.norm.weight", next(name for name in tensors if ".experts.1." in name)):
        save_file({**tensors, name: tensors[name] + 1}, path, {"format": "pt"})
        verify_saved.add_saved_checks(live, run, checks)
        assert not checks.entries[-1].passed, name
