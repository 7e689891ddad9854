"""Options of LoRA that other programs' adapters lack."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from peft import LoraConfig

from finetune.core.errors import UserError
from finetune.export import gguf_lora, mlx_export, vllm_rules

# Options of LoraConfig that leave A and B, and what the layer computes with them, as they are
SAME = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "fan_in_fan_out",
    "use_rslora",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "megatron_config",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "runtime_config",
    "qalora_group_size",
    "ensure_weight_tying",
}
SET: dict[str, Any] = {
    "bias": "all",
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "target_parameters": ["w"],
}


def test_each_option_of_lora_is_known() -> None:
    """A new option of PEFT is either harmless here, or refused."""
    for field in fields(LoraConfig):
        config = {"peft_type": "LORA", "r": 8, field.name: SET.get(field.name, [1])}
        if field.name not in SAME:
            assert vllm_rules.refusals(config), field.name


@pytest.mark.parametrize("check", [gguf_lora.check, mlx_export.check_adapter])
@pytest.mark.parametrize("name", vllm_rules.VARIANTS)
def test_adapter_with_another_kind_of_lora_is_refused(check: Any, name: str, tmp_path) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(config))
    check(tmp_path)
    path.write_text(json.dumps({**config, name: {"nblocks": 2}}))
    with pytest.raises(UserError, match=f"the option {name}"):
        check(tmp_path)
