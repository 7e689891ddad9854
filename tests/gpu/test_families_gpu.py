"""The fast forwards on each family's own shapes: the widths of its largest dense models, two layers deep."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.quantization import fp8_linear
from finetune.speed.fused_layers import Fused
from finetune.speed.live_model_spec import decoder_layers
from support.kernel_steps import apart, step
from support.soak import soak_except

# hidden, intermediate, heads, key-value heads, head size
FAMILIES = {
    "llama": (8192, 28672, 64, 8, 128),  # Llama 3 70B
    "mistral": (5120, 32768, 32, 8, 128),  # Mistral Small 24B
    "qwen2": (8192, 29568, 64, 8, 128),  # Qwen2.5 72B
    "qwen3": (5120, 25600, 64, 8, 128),  # Qwen3 32B
    "gemma3_text": (5376, 21504, 32, 16, 128),  # Gemma 3 27B
    "phi3": (5120, 17920, 40, 10, 128),  # Phi 4
}

OFTEN = [  # each family once, and each base with each adapter
    ("llama", "fp8", "dora"),
    ("mistral", "bf16", "lora"),
    ("qwen2", "fp8", "lora"),
    ("qwen3", "bf16", "dora"),
    ("gemma3_text", "fp8", "lora"),
    ("phi3", "bf16", "lora"),
]


def model(family: str, stored: str, dora: bool) -> Any:
    torch.manual_seed(0)
    hidden, intermediate, heads, shared, size = FAMILIES[family]
    config = AutoConfig.for_model(
        family, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=shared, head_dim=size, vocab_size=1000, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made = get_peft_model(made, LoraConfig(r=16, target_modules="all-linear", use_dora=dora))
    for name, parameter in made.named_parameters():
        if parameter.requires_grad and "magnitude" not in name:
            parameter.data += 0.02 * torch.randn_like(parameter)
    for module in made.modules() if stored == "fp8" else ():
        if isinstance(inside := getattr(module, "base_layer", None), torch.nn.Linear):
            module.base_layer = fp8_linear.Fp8Linear.of(inside)
    return made.train()


@pytest.mark.parametrize(
    ("family", "stored", "kind"), soak_except(OFTEN, product(FAMILIES, ["bf16", "fp8"], ["lora", "dora"]))
)
def test_largest_shapes(family: str, stored: str, kind: str) -> None:
    """Compiled whole, on PEFT's own gradients to what 16 and 8 bits allow (as in test_kernels_gpu)."""
    made = model(family, stored, kind == "dora")
    loss, gradients = step(made, 4096)
    fused = Fused(made, decoder_layers(made))
    assert not fused.left and fused.mlps == 2
    torch._dynamo.reset()
    for layer in decoder_layers(made):
        layer.compile(fullgraph=True)
    ours, our_gradients = step(made, 4096)
    assert abs(ours - loss) < 2e-2
    assert apart(our_gradients, gradients) < (0.06 if stored == "bf16" else 0.25)
