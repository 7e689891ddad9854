"""Shapes of models from their config or their files' headers, as the real model has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from finetune.autoconfig import memory_estimate
from finetune.core.errors import Exit, UserError
from finetune.models import architecture, model_class
from finetune.recipe.schema import Model
from support.architectures import CONFIGS, MULTIMODAL, config_of
from support.plans import LLAMA_8B, planned

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_experts_are_planned_with_balanced_routing(large) -> None:
    config = {
        **LLAMA_8B,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    (large.parent / "8b" / "config.json").write_text(json.dumps(config))
    made = planned(large)
    assert made.step_seconds and any("each expert gets the same number" in note for note in made.notes)
    assert sum(made.phases["load"].values()) > 1


def test_a_config_s_vision_tower_is_in_the_memory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    text = {"model_type": "gemma3_text", **SMALL, "head_dim": 16}
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": seen}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = architecture.read(Model(name=str(tmp_path)))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps(text))
    alone = architecture.read(Model(name=str(tmp_path / "text")))
    assert found.of_text == alone.parameters < found.parameters and not found.unknown
    assert len(found.stored) > len(found.linear) == 14


@pytest.mark.parametrize("text", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize("outer", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}])
@pytest.mark.parametrize(
    ("family", "inner"),
    [
        ("qwen2_vl", "qwen2_vl_text"), ("qwen2_5_vl", "qwen2_5_vl_text"), ("qwen3_vl", "qwen3_vl_text"),
        ("glm4v", "glm4v_text"), ("gemma3", "gemma3_text"), ("mistral3", "mistral"), ("llava", "llama"),
    ],
)  # fmt: skip
def test_head_of_a_text_model_is_tied_as_in_transformers(
    family: str, inner: str, outer: dict[str, bool], text: dict[str, bool]
) -> None:
    from transformers import AutoConfig

    real = AutoConfig.for_model(family, text_config={"model_type": inner, **text}, **outer)
    tied = real.tie_word_embeddings
    read = architecture.as_config(
        {"model_type": family, **outer, "text_config": {"model_type": inner, **text}}
    )
    assert read.get_text_config().tie_word_embeddings == tied
    assert model_class.has_tied_head(read) == model_class.has_tied_head(real) == tied
    named = f"{type(real).__name__.removesuffix('Config')}Model"  # a checkpoint without a head
    for config in (read, real):
        config.architectures = [named]
        assert ("no output head" in model_class.unsupported(config)) != tied


@pytest.mark.parametrize(
    "family", ["bloom", "gptj", "codegen", "gpt_neo", "gpt_bigcode", "mpt", "gpt2", "openai-gpt"]
)
def test_a_familys_own_names_of_its_widths_are_read(family: str) -> None:
    """As transformers' classes have them, of a config that says all and of one that says what differs."""
    from transformers import AutoConfig

    real = AutoConfig.for_model(family, num_attention_heads=8)
    for said in (real.to_dict(), real.to_diff_dict()):
        config = architecture.as_config(json.loads(json.dumps(said, default=str)))
        assert {key: getattr(config, key) for key in architecture.NEEDED} == {
            key: getattr(real, key) for key in architecture.NEEDED
        }
    assert architecture.as_config({"model_type": family, "num_hidden_layers": 5}).num_hidden_layers == 5


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_a_model_without_attention_is_refused(family: str, tmp_path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(AutoConfig.for_model(family).to_json_string(use_diff=False))
    with pytest.raises(
        UserError, match=f"can't estimate a model without attention(.|\n)*{family}: no num_attention"
    ):
        architecture.read(Model(name=str(tmp_path)))


def test_layers_of_several_widths_are_planned_by_the_widest() -> None:
    config = {"model_type": "gemma3n_text", **SMALL, "intermediate_size": [128, 256]}
    assert memory_estimate.widths(architecture.as_config(config)).intermediate == 256


def test_a_model_that_needs_another_package_is_refused(tmp_path, monkeypatch) -> None:
    """Gemma 3n's images are read by timm."""
    from transformers import AutoModelForCausalLM

    def lacks(*_: Any, **options: Any) -> None:
        raise ImportError("\nTimmWrapperModel requires the timm library.\n")

    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_config", lacks)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stablelm", **SMALL}))
    with pytest.raises(UserError, match=r"TimmWrapperModel requires the timm library\.") as caught:
        architecture.read(Model(name=str(tmp_path)))
    assert caught.value.code == Exit.ENVIRONMENT


def test_experts_are_no_linear_layers_and_are_quantized(tmp_path) -> None:
    """In a checkpoint each is a matrix. In the model all of them are one parameter."""
    from safetensors.torch import save_file

    config = {
        "model_type": "qwen3_moe",
        **SMALL,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = architecture.read(Model(name=str(tmp_path)))
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in whole.tensors.items()}
    for name in [name for name in weights if ".experts." in name]:
        joined, where = weights.pop(name), name.rpartition(".")[0]
        for index, one in enumerate(joined):
            parts = {"gate_proj": one[:32], "up_proj": one[32:]} if "gate_up" in name else {"down_proj": one}
            weights |= {f"{where}.{index}.{kind}.weight": part.clone() for kind, part in parts.items()}
    save_file(weights, tmp_path / "model.safetensors")
    apart = architecture.read(Model(name=str(tmp_path)))
    assert apart.names == whole.names and apart.parameters == whole.parameters
    assert apart.linear == whole.linear and not [name for name in apart.linear if "experts" in name]
    found = [architecture.weights(one, "fp8", "bf16") for one in (whole, apart)]
    linear = sum(outputs * inputs - 4 * outputs for outputs, inputs in apart.linear.values())
    stacks = [shape for name, shape in whole.tensors.items() if ".experts." in name]
    assert len(stacks) == 4
    stacked = sum(experts * (outputs * inputs - 4 * outputs) for experts, outputs, inputs in stacks)
    assert found[0] == found[1] == 2 * whole.parameters - linear - stacked
    plain = [architecture.weights(one, "torchao_int8", "bf16") for one in (whole, apart)]
    assert plain[0] == plain[1] > found[0] + stacked / 2


def test_adapters_that_are_not_counted_are_taken_for_what_is_said(large) -> None:
    """VeRA's r of 256 is of vectors, not of matrices."""
    vera = planned(large, "adapter.type=vera", "adapter.r=256")
    assert vera.trained == planned(large, "adapter.r=16").trained
    assert "the plan does not know the size of vera, and assumes LoRA with r 16" in vera.notes


@pytest.mark.parametrize("family", [*CONFIGS, *MULTIMODAL])
def test_sizes_of_a_saved_config_are_those_of_transformers(family: str, tmp_path) -> None:
    """A family may save other keys than it has: Nemotron-H saves no number of layers."""
    theirs = config_of(family)
    theirs.save_pretrained(tmp_path)
    ours = architecture.config_in(tmp_path / "config.json").get_text_config()
    for key in architecture.NEEDED:
        assert getattr(ours, key, None) == getattr(theirs.get_text_config(), key, None), key
