"""Small models, batches and their gradients, for tests of activations that are offloaded."""

from __future__ import annotations

import torch
from peft import IA3Config, LoraConfig, get_peft_model

from support.paths import MODEL

ADAPTERS = {
    "lora": lambda: LoraConfig(r=16, target_modules="all-linear"),
    "dora": lambda: LoraConfig(r=16, target_modules="all-linear", use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}


def model_of(kind: str):
    """Two layers of the embedded model in fp32: `full`, or LoRA on all linear layers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.model.layers = model.model.layers[:2]
    return model if kind == "full" else get_peft_model(model, ADAPTERS[kind]())


def batches(model, number: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    size = model.config.vocab_size
    return [torch.randint(0, size, (2, 32), generator=made).to(model.device) for _ in range(number)]


def gradients(model, micro_batches: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and the gradients that add up over micro-batches."""
    model.train().zero_grad()
    losses = []
    for ids in batches(model, micro_batches):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(one, other) -> None:
    assert one[0] == other[0] and one[1].keys() == other[1].keys() and one[1]
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


def distance(weights: torch.Tensor, plain: torch.Tensor, before: torch.Tensor | float = 0.0) -> float:
    return float((weights - plain).norm() / (plain - before).norm())
