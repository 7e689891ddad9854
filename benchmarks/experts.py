"""Tokens/s and peak memory of six layers with the sizes of Qwen3-30B-A3B, on one GPU.

    python benchmarks/experts.py                 # all rows
    python benchmarks/experts.py lora peft       # some rows

Weights and tokens are random. Each row trains LoRA r=16 on four sequences of 4,096 tokens, without activation
checkpointing and without the routers' load-balancing loss. Three warm-up steps do not count.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.autoconfig.compilation import Work
from finetune.core.run_checks import RunChecks
from finetune.hardware.detection import detect
from finetune.kernels import attention_functions, kernel_limits
from finetune.recipe.schema import Speed
from finetune.speed import apply_to_model, lm_head_loss

SEQUENCES, LENGTH, VOCABULARY, STEPS, WARM_UP = 4, 4096, 151_936, 10, 3
TOKENS = SEQUENCES * LENGTH
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ROWS: dict[str, tuple[list[str] | None, dict[str, Any]]] = {  # name -> adapted experts, speed settings
    "lora": (EXPERTS, {"fused": "auto", "compile": True}),
    "lora_eager": (EXPERTS, {"fused": "auto", "compile": False}),
    "frozen": (None, {"fused": "auto", "compile": True}),
    "peft": (EXPERTS, {"fused": False, "compile": False}),
}


def build(experts: list[str] | None, layers: int = 6) -> Any:
    """Return the model with its adapter. The weights are created on the GPU."""
    torch.manual_seed(0)
    attention_functions.register("cudnn")
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32, "head_dim": 128}
    sizes |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, max_position_embeddings=8192, **sizes)
    attention = kernel_limits.IMPLEMENTATIONS["cudnn"]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=experts)
    return get_peft_model(model, lora).train()


def measure(name: str) -> dict[str, Any]:
    """Train a row and return its figures."""
    experts, settings = ROWS[name]
    model = build(experts)
    speed = Speed(activation_checkpointing="none", offload="none", **settings)
    with torch.autocast("cuda", torch.bfloat16):
        choices = apply_to_model.apply(model, speed, Work(TOKENS, 1e20), detect(), RunChecks())
    lm_head_loss.install(model, compiled=bool(settings["compile"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    random = torch.Generator(device="cuda").manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    events, losses = [], []
    for _ in range(WARM_UP + STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), device="cuda", generator=random)
        count = SEQUENCES * (LENGTH - 1)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, num_labels=count).nll / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        events.append((begin, end))
        losses.append(loss.detach())
    torch.cuda.synchronize()
    milliseconds = statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UP:])
    return {
        "row": name,
        "fused": choices.fused.value,
        "tokens_per_second": round(TOKENS / milliseconds * 1000),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "trainable_parameters": sum(parameter.numel() for parameter in trained),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def main() -> None:
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    for name in sys.argv[1:] or ROWS:
        print(json.dumps(measure(name)), flush=True)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
