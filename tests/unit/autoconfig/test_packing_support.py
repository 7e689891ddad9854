"""What a config tells of packing is what the model itself does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from finetune.autoconfig import packing_support
from finetune.models import architecture
from finetune.speed.packing_isolation import leaks
from support.hybrid_families import FAMILIES, config_of
from support.soak import soak_except

SIZE = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SIZE, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 128}
OLD = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT_NEO = {"vocab_size": 99, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
SCAN = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE, head_dim=8),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**WIDE, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(**OLD),
    "gptj": lambda: transformers.GPTJConfig(**OLD, rotary_dim=8),
    "gpt_neo": lambda: transformers.GPTNeoConfig(**GPT_NEO, attention_types=[[["global", "local"], 1]]),
    "opt": lambda: transformers.OPTConfig(**SIZE, ffn_dim=64, word_embed_proj_dim=32),
    "biogpt": lambda: transformers.BioGptConfig(**WIDE),
    "bloom": lambda: transformers.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4),
    "mpt": lambda: transformers.MptConfig(vocab_size=99, d_model=32, n_layers=2, n_heads=4),
    "falcon": lambda: transformers.FalconConfig(**SIZE),
    "xglm": lambda: transformers.XGLMConfig(
        vocab_size=99, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **WIDE, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "lfm2": lambda: transformers.Lfm2Config(**WIDE, layer_types=["conv", "full_attention"]),
    "bamba": lambda: transformers.BambaConfig(**WIDE, **SCAN, attn_layer_indices=[1]),
    "mamba": lambda: transformers.MambaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **{**SIZE, "num_hidden_layers": 3}, intermediate_size=64, attention_window_size=64, lru_width=32
    ),
    "rwkv": lambda: transformers.RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2),
}


@pytest.mark.parametrize("family", soak_except(("mamba2", "zamba", "zamba2", "lfm2"), FAMILIES))
def test_borders_reach_the_layers_of_the_families_that_kernels_separate(family: str) -> None:
    """Without its kernel, a layer that gets the borders raises an error. Other layers ignore them."""
    kernels = FAMILIES[family].kernels
    assert packing_support.crosses_borders(family) == (kernels is None)
    assert kernels is None or set(kernels) == set(packing_support.missing_kernels(family))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family)).train()
    if kernels is None and family != "zamba":  # whose convolution gets the borders, and whose scan does not
        assert leaks(model, 32)[1].logits > 0
    else:
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
            leaks(model, 32)


def keeps_apart(config: Any) -> bool:
    """Whether a model of this config keeps two documents apart; one that refuses them does not."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.08)
    try:
        _, moved = leaks(model, 32)
    except ValueError:
        return False
    return moved.logits < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_obstacle_by_config_alone_is_what_the_model_does(family: str, tmp_path) -> None:
    config = CONFIGS[family]()
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    by_file = packing_support.unsupported_reason(architecture.config_in(tmp_path / "config.json"), "auto")
    assert by_file == packing_support.unsupported_reason(config, "auto")
    assert (by_file == "") == keeps_apart(config), by_file
