"""Weights whose shapes are not those of config.json are refused from the files' headers, before they load."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import checkpoint_headers, loading
from finetune.preflight import checker, choice_checks
from finetune.recipe import loader
from support import tiny_models
from support.paths import MODEL, QUICKSTART

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(
    ("key", "change"),
    [("hidden_size", 2), ("intermediate_size", 2), ("vocab_size", 2), ("num_key_value_heads", 2)],
)
def test_config_with_other_sizes_than_the_weights_is_refused(
    key: str, change: int, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config[key] *= change
    (folder / "config.json").write_text(json.dumps(config))
    recipe = loader.load(QUICKSTART, [f"model.name={folder}", f"adapter.type={kind}"])
    with pytest.raises(UserError) as refused:
        checker.check_without_examples(recipe)
    said = [one for one in refused.value.problems if "other shapes than its config.json" in one.what]
    assert said and "in the files" in said[0].found


def with_tensor(name: str, *more: str) -> Callable[[Path], None]:
    """Add tensors of 64 values to a model."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors |= {each: torch.ones(64) for each in (name, *more)}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def with_layers(number: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": number}))

    return change


@pytest.mark.parametrize("command", ("check", "train"))
@pytest.mark.parametrize(
    "change",
    (
        with_tensor("model.layers.0.self_attn.q_proj.bias"),
        with_tensor("model.layers.0.self_attn.q_norm.weight"),
        with_layers(1),
    ),
    ids=("biases of Qwen2", "norms of Qwen3", "fewer layers"),
)
def test_weights_that_the_model_of_the_config_does_not_use_are_refused(
    change: Callable[[Path], None],
    command: str,
    two_layers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """transformers drops these weights, and the model computes something else."""
    folder = tmp_path / "model"
    shutil.copytree(two_layers, folder)
    change(folder)
    assert main.main([command, str(tiny_models.recipe(tmp_path, folder)), "--quiet"]) == 2
    assert "weights of the files" in capsys.readouterr().err


def test_tensors_of_other_parts_are_noted(two_layers: Path, tmp_path: Path) -> None:
    """A head for rewards, a layer that predicts more tokens, and a buffer of earlier releases."""
    folder = tmp_path / "model"
    shutil.copytree(two_layers, folder)
    with_tensor(
        "v_head.summary.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    )(folder)
    recipe, checks = loader.load(tiny_models.recipe(tmp_path, folder)), RunChecks()
    checker.check_without_examples(recipe)
    loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu", checks)
    (note,) = checks.notes
    assert "does not use 3 tensors of the files: model.layers.2.eh_proj.weight" in note


def test_layers_of_a_family_without_a_shipped_list_are_counted(tmp_path: Path) -> None:
    config = AutoConfig.for_model("cohere", **tiny_models.sizes())
    folder = tiny_models.save(tmp_path / "model", AutoModelForCausalLM.from_config(config))
    recipe = loader.load(tiny_models.recipe(tmp_path, folder))
    checker.check_without_examples(recipe)
    with_layers(1)(folder)
    with pytest.raises(UserError, match="does not use 8 weights of the files"):
        checker.check_without_examples(recipe)


@pytest.mark.parametrize("name", ("attn.bias", "attn.masked_bias", "attn.rotary_emb.inv_freq"))
def test_buffers_of_old_checkpoints_are_accepted(name: str) -> None:
    parameters = [
        f"transformer.h.{layer}.attn.c_attn.{kind}" for layer in "01" for kind in ("weight", "bias")
    ]
    stored = [*parameters, f"transformer.h.0.{name}", f"h.1.{name}"]
    checkpoint_headers.check_used(stored, parameters, same_names=True)
    with pytest.raises(UserError, match="does not use 1 weights"):
        checkpoint_headers.check_used([*stored, "h.1.attn.c_proj.bias"], parameters, same_names=True)


@pytest.mark.parametrize("kind", ["gemma3", "llava"])
def test_files_that_are_too_small_for_the_default_model_of_another_family_are_refused(
    kind: str, tmp_path: Path
) -> None:
    """transformers would fill the memory with random weights before it compares them with the files."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    recipe = loader.load(QUICKSTART, [f"model.name={folder}"])
    with pytest.raises(UserError) as refused:
        checker.check_without_examples(recipe)
    assert any("too small for the model" in problem.what for problem in refused.value.problems)
    with pytest.raises(UserError, match="too small for the model"):
        loading.load(recipe.model, choice_checks.setup_of(recipe), "cpu")
