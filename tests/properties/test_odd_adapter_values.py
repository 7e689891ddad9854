"""Every option of every adapter type with odd values: what `check` accepts attaches, and trains a step."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml
from transformers import AutoConfig

from finetune.core.errors import UserError
from finetune.models import architecture, module_lists
from finetune.recipe import adapter_types, build, loader
from support.adapter_cells import refused_by_check, why_not_trained

if TYPE_CHECKING:
    from pathlib import Path

SAMPLE = 60
SEED = int(os.environ.get("FINETUNE_CELLS_SEED") or time.time())
VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 0.5, 1.0, 2.5, 1e30, float("nan"), None, "x", "", [], {}, True, False, [1], ["q_proj"],
)  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
OWN_TARGETS = ("trainable_tokens", "ln_tuning", "ia3", "beft")
SLOW = ("frod", "osf", "adamss")  # decompose weights: the long form takes them


class Case(NamedTuple):
    kind: str
    key: str
    value: Any


def cases(*, slow: bool) -> list[Case]:
    offered = [name for name, kind in adapter_types.all_types().items() if kind.peft and not kind.refused]
    return [
        Case(name, key, value)
        for name in offered
        if slow or name not in SLOW
        if not adapter_types.find(name).storage
        for key in sorted(build.adapter_keys(name) - {"type", "init_from"})
        for value in VALUES
    ]


def verdicts(case: Case, folder: Path) -> tuple[str, str]:
    """Why `check` and why `train` refuse a case, empty where they accept."""
    config = AutoConfig.for_model("llama", **SIZES)
    path = folder / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    section = {"type": case.kind, case.key: case.value}
    if "target_modules" in adapter_types.find(case.kind).keys and case.kind not in OWN_TARGETS:
        section = {"target_modules": "all-linear", **section}
    raw = {"model": {"name": str(folder)}, "data": {"name": "data.jsonl"}, "adapter": section}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    try:
        recipe = loader.load(folder / "recipe.yaml", ["train.max_steps=20"])
    except UserError as error:
        return str(error), "the recipe does not load"
    names = module_lists.read(path, architecture.config_in(path)).names
    found = refused_by_check(recipe, names, folder)
    return "\n".join(map(str, found or ())), "" if found else why_not_trained(recipe, config)


def disagreements(asked: list[Case], folder: Path) -> list[str]:
    both = ((case, *verdicts(case, folder)) for case in asked)
    return [f"{case}\n  train: {said}" for case, by_check, said in both if said and not by_check]


def test_check_accepts_no_odd_value_that_train_refuses(tmp_path: Path) -> None:
    print(f"FINETUNE_CELLS_SEED={SEED}")
    asked = random.Random(SEED).sample(cases(slow=False), SAMPLE)
    assert "\n".join(disagreements(asked, tmp_path)) == "", f"FINETUNE_CELLS_SEED={SEED}"


@pytest.mark.soak
def test_check_accepts_no_odd_value_of_any_option_that_train_refuses(tmp_path: Path) -> None:
    assert "\n".join(disagreements(cases(slow=True), tmp_path)) == ""
