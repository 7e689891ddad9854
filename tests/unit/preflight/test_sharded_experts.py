"""Adapters on stacked experts under launches that shard the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.models import module_names
from finetune.preflight import adapter_names
from finetune.recipe import loader
from support.architectures import CONFIGS
from support.paths import QUICKSTART, ROOT
from support.scripts import module_of

if TYPE_CHECKING:
    from finetune.models.module_names import Names


@pytest.fixture(scope="module")
def names() -> Names:
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"])
        return module_names.of_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    ("config", "targets", "refused"),
    [
        ("zero3_8", "all-linear-and-experts", True), ("zero3_8_offload", "all-linear-and-experts", True),
        ("zero3_8", "all-linear", False), ("zero2_8", "all-linear-and-experts", False),
        ("fsdp2_8", "all-linear-and-experts", False), ("ddp_2", "all-linear-and-experts", False),
    ],
)  # fmt: skip
def test_zero_3_refuses_adapters_on_experts(
    config: str, targets: str, refused: bool, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT would read the shapes of shards, and say that it can't adapt the experts."""
    file = ROOT / "accelerate_configs" / f"{config}.yaml"
    for name, value in module_of("scripts", "launch_matrix").environment(file).items():
        monkeypatch.setenv(name, value)
    recipe: Any = loader.load(QUICKSTART, [f"adapter.target_modules={targets}"])
    found = adapter_names.check_sharded_experts(recipe, names)
    assert [problem.what for problem in found] == (
        ["ZeRO-3 can't shard stacked experts that have an adapter"] if refused else []
    )
