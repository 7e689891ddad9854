"""Experts that are missing, renamed or of another shape: transformers would stack others in their place."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.cli import main
from support import tiny_models
from support.expert_families import config_of

if TYPE_CHECKING:
    import torch

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
    "no first expert": (renamed("0", ""), "lack weights of an expert"),
    "no last expert": (renamed("3", ""), "another number of experts"),
    "first expert renamed": (renamed("0", "9"), "lack weights of an expert"),
    "a number with a zero": (renamed("1", "01"), "lack weights of an expert"),
    "one tensor renamed": (renamed("0", "9", ".down_proj"), "lack weights of an expert"),
    "one tensor renamed in mixtral": (renamed("0", "9", ".w1"), "lack weights of an expert"),
    "one expert more": (with_one_more, "another number of experts"),
    "transposed": (transposed, "other shapes"),
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
