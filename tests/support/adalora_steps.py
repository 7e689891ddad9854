"""A tiny AdaLoRA, and its steps."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 12


def tiny(**options) -> tuple[nn.Module, LlamaForCausalLM]:
    """AdaLoRA on a random model of two layers, always the same, and its base."""
    from peft import AdaLoraConfig, get_peft_model

    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    base = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=2))
    given = {"total_step": STEPS, "init_r": 6, "target_r": 3, "tinit": 2, "tfinal": 4, **options}
    given.setdefault("target_modules", "all-linear")
    torch.manual_seed(1)
    return get_peft_model(base, AdaLoraConfig(task_type="CAUSAL_LM", **given)).train(), base


def adamw(model) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
