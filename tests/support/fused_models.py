"""Small models with adapters, and the difference of their gradients from PEFT's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.quantization import fp8_linear
from support.four_bit import in_four_bits

if TYPE_CHECKING:
    from collections.abc import Callable

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
    "pad_token_id": 0,
}
IDS = torch.arange(40).view(2, 20) % 99


def ranked(**options: Any) -> LoraConfig:
    return LoraConfig(r=5, lora_alpha=16, target_modules="all-linear", **options)


TYPES: dict[str, Callable[[], Any]] = {
    "lora": ranked,
    "rslora": lambda: ranked(use_rslora=True),
    "rank_pattern": lambda: ranked(rank_pattern={"k_proj": 3, "up_proj": 20}, alpha_pattern={"up_proj": 7}),
    "dora": lambda: ranked(use_dora=True),
    "adalora": lambda: AdaLoraConfig(init_r=6, target_r=4, total_step=10, target_modules=LINEAR),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "ia3_everywhere": lambda: IA3Config(target_modules=LINEAR, feedforward_modules=["down_proj"]),
    "ia3_entries": lambda: IA3Config(
        target_modules=LINEAR, feedforward_modules=["o_proj", "gate_proj", "up_proj", "down_proj"]
    ),
    "attention only": lambda: LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


def adapted(
    config: Any, family: str = "llama", dtype: Any = torch.float64, base: str = "plain", **sizes: Any
) -> Any:
    """A tiny PEFT model whose adapters are not zero, on a base that is stored plainly, in fp8 or 4 bits."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(family, **{**SIZES, **sizes})
    whole = AutoModelForCausalLM.from_config(made, dtype=dtype)
    if base in ("nf4", "fp4"):
        in_four_bits(whole, base)
    model = get_peft_model(whole, config, autocast_adapter_dtype=False)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
            if "magnitude" not in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
    for module in model.modules() if base == "fp8" else ():
        if isinstance(inside := getattr(module, "base_layer", None), torch.nn.Linear):
            module.base_layer = fp8_linear.Fp8Linear.of(inside)
    return model.train()


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients


def worst(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp(min=1e-30)) for n in theirs)
