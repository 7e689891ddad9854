"""An adapter to continue from whose files do not fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.adapters import continue_from
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.models import module_lists
from finetune.recipe import loader
from support.architectures import CONFIGS
from support.paths import QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path


def base_model() -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIGS["llama"]))


@pytest.mark.parametrize("key", ["exclude_modules", "layers_pattern"])
def test_pattern_of_a_saved_adapter_that_is_no_regular_expression_is_an_error(
    key: str, tmp_path: Path
) -> None:
    options = {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}
    get_peft_model(base_model(), LoraConfig(r=2, task_type="CAUSAL_LM", **options)).save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: "(q"}))
    given = [f"adapter.init_from={tmp_path}", "adapter.from_other_base=true"]
    recipe = loader.load(QUICKSTART, [*given, "adapter.r=2", "adapter.lora_alpha=8"])
    base = base_model()
    with pytest.raises(UserError, match="does not fit this model") as caught:
        continue_from.load(base, recipe.adapter, module_lists.of_live_model(base), [], RunChecks())
    assert "unterminated subpattern" in str(caught.value)
