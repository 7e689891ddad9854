"""Experts that are missing, renamed or of another shape: transformers would stack others in their place."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.adapters import saved_layout
from finetune.cli import main
from finetune.core.errors import Problem
from finetune.models import architecture, module_lists
from support import tiny_models
from support.expert_families import config_of

FAMILIES = ("qwen3_moe", "mixtral")  # the second has other names in its files than in the model
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..+)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("experts")
    sizes = tiny_models.sizes()
    keys = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")
    own = {key: sizes[key] for key in keys}
    return {
        family: tiny_models.save(place / family, AutoModelForCausalLM.from_config(config_of(family, **own)))
        for family in FAMILIES
    }


def renamed(first: str, to: str, kind: str = "") -> Callable[[dict[str, Any]], None]:
    """Rename the tensors of an expert of one layer; without a new number, delete them."""

    def damage(tensors: dict[str, Any]) -> None:
        for name in [*tensors]:
            found = EXPERT.fullmatch(name)
            if found and ".1." in found[1] and found[2] == first and found[3].startswith(kind):
                held = tensors.pop(name)
                tensors.update({f"{found[1]}{to}{found[3]}": held} if to else {})

    return damage


def transposed(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if ".experts.2." in name)
    tensors[name] = tensors[name].T.contiguous()


def with_one_more(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        if ".experts.3." in name:
            tensors[name.replace(".experts.3.", ".experts.4.")] = tensors[name].clone()


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no first expert": (renamed("0", ""), "same weights of every expert"),
    "no last expert": (renamed("3", ""), "another number of experts"),
    "first expert renamed": (renamed("0", "9"), "same weights of every expert"),
    "a number with a zero": (renamed("1", "01"), "same weights of every expert"),
    "one tensor renamed": (renamed("0", "9", ".down_proj"), "same weights of every expert"),
    "one tensor renamed in mixtral": (renamed("0", "9", ".w1"), "same weights of every expert"),
    "one expert more": (with_one_more, "another number of experts"),
    "transposed": (transposed, "same weights of every expert"),
}
CASES = [
    (family, case)
    for family in FAMILIES
    for case in DAMAGE
    if case != f"one tensor renamed{' in mixtral' * (family != 'mixtral')}"
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_damaged_experts_are_refused_by_check(
    family: str, case: str, models: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    damage, said = DAMAGE[case]
    assert main.main(["check", str(damaged(models[family], tmp_path, damage))]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("case", ("first expert renamed", "one tensor renamed", "no last expert"))
def test_damaged_experts_are_refused_by_train(
    case: str, models: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    recipe = damaged(models["qwen3_moe"], tmp_path, DAMAGE[case][0])
    assert main.main(["train", str(recipe), "--quiet"]) == 2
    assert "[model-files]" in capsys.readouterr().err


def damaged(model: Path, place: Path, damage: Callable[[dict[str, Any]], None]) -> Path:
    """The recipe of a copy of a model with changed tensors."""
    copy = Path(shutil.copytree(model, place / "model"))
    tensors = load_file(copy / "model.safetensors")
    damage(tensors)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return tiny_models.recipe(place, copy)


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_experts_are_accepted(family: str, models: dict[str, Path], tmp_path: Path) -> None:
    assert main.main(["check", str(damaged(models[family], tmp_path, lambda _: None))]) == 0


def saved_adapter(folder: Path, **options: Any) -> Path:
    """Save the adapter of a layer with one module per expert, as PEFT did with transformers 4."""
    folder.mkdir()
    layers = [
        f"base_model.model.model.layers.1.mlp.experts.{number}.{layer}"
        for number in range(4)
        for layer in ("gate_proj", "up_proj", "down_proj")
    ]
    sizes = {"lora_A": (2, 8), "lora_B": (8, 2)}
    tensors = {f"{name}.{part}.weight": torch.ones(size) for name in layers for part, size in sizes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **options}))
    return folder


def layout_problems(folder: Path, model: Path) -> list[Problem]:
    names = module_lists.read(model / "config.json", architecture.config_in(model / "config.json")).names
    return saved_layout.check_layout(folder, names, "lora")


LOST = [
    {"use_rslora": True},
    {"alpha_pattern": {"gate_proj": 16}},
    {"rank_pattern": {r"layers\.1\..*": 4}},
]


@pytest.mark.parametrize("options", LOST, ids=str)
def test_options_that_peft_loses_when_it_stacks_experts_are_refused(
    options: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    (problem,) = layout_problems(saved_adapter(tmp_path / "adapter", **options), models["qwen3_moe"])
    assert "another scale" in problem.what


def test_an_adapter_with_other_numbers_of_experts_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "adapter", alpha_pattern={"q_proj": 16})
    assert layout_problems(folder, models["qwen3_moe"]) == []
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed("0", "7")(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    (problem,) = layout_problems(folder, models["qwen3_moe"])
    assert "same weights of every expert" in problem.what
