"""Quantized checkpoints after transformers has loaded them."""

from __future__ import annotations

import torch
import transformers

from finetune.core.run_checks import RunChecks
from finetune.models import quantized_loading
from finetune.quantization.stored_weights import Stored

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


def test_finish_casts_float32_weights_of_a_checkpoint_to_the_dtype_of_the_run() -> None:
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.embed_tokens.float()
    model.model.norm.float()
    checks = RunChecks()
    quantized_loading.finish(
        model, Stored("compressed-tensors", "", "8 bits"), "bf16", torch.bfloat16, checks
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert [check.passed for check in checks.entries] == [True]
