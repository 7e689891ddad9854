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


SHAPES = [
    5, "text", [], {"added_tokens": 5}, {"added_tokens": {"a": 1}}, {"added_tokens": [5]},
    {"added_tokens": [{"id": 1}]}, {"added_tokens": [{"contenu": "a", "id": 1}]},
    {"added_tokens": [{"content": "a"}]},
    {"added_tokens": [{"content": ["a"], "id": 1}]}, {"added_tokens": [{"content": "a", "id": "1"}]},
    {"added_tokens": [{"content": "a", "id": [1]}]}, {"added_tokens": [{"content": "a", "id": True}]},
]  # fmt: skip


@pytest.mark.parametrize("content", SHAPES, ids=str)
def test_tokenizer_of_a_saved_adapter_with_another_shape_is_an_error(content: Any, tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(base_model(), lora).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    recipe = loader.load(QUICKSTART, [f"adapter.init_from={tmp_path}", "adapter.from_other_base=true"])
    if content in ([], {}):
        continue_from.check_tokens(recipe.adapter, [], {}, 97)
        return
    with pytest.raises(UserError, match=r"tokenizer\.json of the saved adapter is damaged"):
        continue_from.check_tokens(recipe.adapter, [], {}, 97)
