"""Tokens/s and peak memory of six layers with the sizes of Qwen3-30B-A3B, on one GPU.

    python benchmarks/experts.py                 # all rows
    python benchmarks/experts.py bf16 unsloth    # some rows
    python benchmarks/experts.py --profile nf4   # with the time of each kernel

The first call writes a checkpoint of 8 GB with random weights to the folder of `--model`. Each row loads it,
and trains LoRA r=16 on attention and experts. A step has four sequences of 4,096 random tokens. No row uses
activation checkpointing, apart from what Unsloth's kernels recompute. Three warm-up steps do not count.
finetune's rows do not compute the routers' load-balancing loss.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

SEQUENCES, LENGTH, VOCABULARY, STEPS, WARM_UP = 4, 4096, 151_936, 10, 3
TOKENS = SEQUENCES * LENGTH
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


class Row(NamedTuple):
    """A row of the table."""

    storage: str = "none"
    """The value of `model.quantization`."""
    experts: bool = True
    """Whether the experts have adapters."""
    compile: bool = True
    fused: bool = True


ROWS = {
    "bf16": Row(),
    "nf4": Row("nf4"),
    "fp8": Row("fp8"),
    "int8": Row("int8"),
    "bf16-frozen": Row(experts=False),
    "bf16-eager": Row(compile=False),
    "peft": Row(compile=False, fused=False),
}
UNSLOTH = {"unsloth": False, "unsloth-nf4": True}  # whether it loads in 4 bits


def write(folder: Path, layers: int) -> None:
    """Write the checkpoint, with a tokenizer, which Unsloth wants."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32, "head_dim": 128}
    sizes |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("qwen3_moe", norm_topk_prob=True, max_position_embeddings=8192, **sizes)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def ours(folder: Path, row: Row) -> tuple[Any, str]:
    """Return the model of a row of finetune or of plain PEFT, and what is fused."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.autoconfig.compilation import Work
    from finetune.core.run_checks import RunChecks
    from finetune.hardware.detection import detect
    from finetune.kernels import attention_functions, kernel_limits
    from finetune.models import quantized_loading
    from finetune.quantization import stacked_experts
    from finetune.recipe.schema import Speed
    from finetune.speed import apply_to_model, fused_experts, lm_head_loss

    attention_functions.register("cudnn")
    options = quantized_loading.options(AutoConfig.from_pretrained(folder), None, row.storage, torch.bfloat16)
    attention = kernel_limits.IMPLEMENTATIONS["cudnn"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention, device_map={"": 0}, **options
    )
    loaded()
    lora = LoraConfig(
        r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=EXPERTS if row.experts else None
    )
    with stacked_experts.plain_parameters(model):
        model = get_peft_model(model, lora).train()
    fused_experts.install_quantized(model)
    fused = "auto" if row.fused else False
    speed = Speed(activation_checkpointing="none", offload="none", fused=fused, compile=row.compile)
    with torch.autocast("cuda", torch.bfloat16):
        choices = apply_to_model.apply(model, speed, Work(TOKENS, 1e20), detect(), RunChecks())
    lm_head_loss.install(model, compiled=row.compile)
    return model, choices.fused.value


def unsloth(folder: Path, *, four_bit: bool) -> tuple[Any, str]:
    """Return the model of Unsloth, as its documentation shows it."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=LENGTH, load_in_4bit=four_bit, dtype=torch.bfloat16
    )
    loaded()
    experts = ["gate_proj", "up_proj", "down_proj", "gate_up_proj"]
    model = FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, target_modules=[*ATTENTION, *experts], use_gradient_checkpointing=False
    )
    return model.train(), "unsloth"


LOADED: dict[str, float] = {}


def loaded() -> None:
    """Record the memory of the loaded base model, and the peak of loading."""
    torch.cuda.synchronize()
    LOADED["loaded_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)
    LOADED["loading_peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def measure(name: str, folder: Path, *, profile: bool) -> dict[str, Any]:
    """Train a row and return its figures."""
    begun = time.monotonic()
    peer = name in UNSLOTH
    model, fused = unsloth(folder, four_bit=UNSLOTH[name]) if peer else ours(folder, ROWS[name])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    random = torch.Generator(device="cuda").manual_seed(1)
    setup = time.monotonic() - begun

    def step() -> torch.Tensor:
        ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), device="cuda", generator=random)
        count = SEQUENCES * (LENGTH - 1)
        with torch.autocast("cuda", torch.bfloat16):
            if peer:
                loss = model(input_ids=ids, labels=ids).loss
            else:
                loss = model(input_ids=ids, labels=ids, num_labels=count).nll / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    torch.cuda.reset_peak_memory_stats()
    events, losses = [], []
    for _ in range(WARM_UP + STEPS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        losses.append(step())
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    if profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step()
            torch.cuda.synchronize()
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=28, max_name_column_width=60))
    milliseconds = statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UP:])
    return {
        "row": name,
        "fused": fused,
        "tokens_per_second": round(TOKENS / milliseconds * 1000),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **LOADED,
        "setup_s": round(setup, 1),
        "trainable_parameters": sum(parameter.numel() for parameter in trained),
        "losses": [round(float(loss), 4) for loss in losses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=[*ROWS, *UNSLOTH])
    parser.add_argument("--model", type=Path, default=Path("/tmp/experts"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--here", action="store_true", help="run the row in this process")
    given = parser.parse_args()
    if not (given.model / "config.json").exists():
        write(given.model, layers=6)
        gc.collect()
        torch.cuda.empty_cache()
    if given.here:
        print(json.dumps(measure(given.rows[0], given.model, profile=given.profile)), flush=True)
        return
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for name in given.rows:  # each in a process of its own, because Unsloth changes transformers
        options = ["--profile"] if given.profile else []
        call = [sys.executable, __file__, "--here", "--model", str(given.model), *options, name]
        subprocess.run(call, check=False)


if __name__ == "__main__":
    main()
