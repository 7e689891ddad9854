"""Tokens/s and peak memory of six layers with the sizes of Qwen3-30B-A3B, on one GPU.

    python benchmarks/experts.py                 # all rows
    python benchmarks/experts.py bf16 unsloth    # some rows
    python benchmarks/experts.py --profile nf4   # with the time of each kernel
    python benchmarks/experts.py --layers 48 --cap 32 nf4-full

The first call writes a checkpoint of 8 GB with random weights to the folder of `--model`. Each row loads it,
and trains LoRA r=16 on attention and experts. A step has four sequences of 4,096 random tokens. No row uses
activation checkpointing, apart from what Unsloth's kernels recompute. Three warm-up steps do not count.
finetune's rows do not compute the routers' load-balancing loss. A model of more than six layers has no
checkpoint: its weights are created and quantized one by one. `--cap` limits the memory to so many GiB.
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
from typing import Any, Literal, NamedTuple

import torch

LAYERS, SEQUENCES, LENGTH, VOCABULARY, STEPS, WARM_UP = 6, 4, 4096, 151_936, 10, 3
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


class Row(NamedTuple):
    """A row of the table."""

    storage: str = "none"
    """The value of `model.quantization`."""
    experts: bool = True
    """Whether the experts have adapters."""
    compile: bool | str = True
    fused: bool = True
    checkpointing: str = "none"
    sequences: int = 4
    length: int = LENGTH
    fp8_experts: Literal["auto"] | bool = "auto"
    """`speed.fp8_experts`."""
    fp8_loss: bool = False
    """`speed.loss: chunked_fp8`. An fp8 base model has it by itself."""


ROWS = {
    "bf16": Row(),
    "nf4": Row("nf4"),
    "fp8": Row("fp8"),
    "int8": Row("int8"),
    "bf16-frozen": Row(experts=False),
    "bf16-eager": Row(compile=False),
    "peft": Row(compile=False, fused=False),
    "bf16-full": Row(checkpointing="full"),
    "fp8-full": Row("fp8", checkpointing="full"),
    "nf4-full": Row("nf4", checkpointing="full"),
    "nf4-full-attention": Row("nf4", experts=False, checkpointing="full"),
    "nf4-full-attention-1": Row("nf4", experts=False, checkpointing="full", sequences=1),
    "nf4-full-1": Row("nf4", checkpointing="full", sequences=1),
    "bf16-graphs": Row(compile="reduce-overhead"),
    "bf16-2048": Row(sequences=1, length=2048),
    "bf16-2048-graphs": Row(compile="reduce-overhead", sequences=1, length=2048),
    "nf4-fp8-experts": Row("nf4", fp8_experts=True),
    "nf4-fp8-experts-loss": Row("nf4", fp8_experts=True, fp8_loss=True),
    "nf4-2048": Row("nf4", sequences=1, length=2048),
    "nf4-2048-graphs": Row("nf4", compile="reduce-overhead", sequences=1, length=2048),
    "fp8-2048": Row("fp8", sequences=1, length=2048),
    "fp8-2048-graphs": Row("fp8", compile="reduce-overhead", sequences=1, length=2048),
}
UNSLOTH = {"unsloth": False, "unsloth-nf4": True}  # whether it loads in 4 bits
TRL = {"trl": False, "trl+liger": True}  # whether Liger's kernels replace the model's


def sizes_of(layers: int) -> dict[str, Any]:
    """Return the sizes of Qwen3-30B-A3B with another number of layers."""
    sizes: dict[str, Any] = {
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    sizes |= {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    sizes |= {"moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": VOCABULARY}
    return {**sizes, "norm_topk_prob": True, "max_position_embeddings": 8192, "tie_word_embeddings": False}


def config_of(layers: int) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model("qwen3_moe", **sizes_of(layers))


def write(folder: Path, layers: int) -> None:
    """Write the checkpoint, with a tokenizer, which Unsloth wants."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config_of(layers), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def create(layers: int, options: dict[str, Any], attention: str) -> Any:
    """Create a model on the GPU, and quantize each weight as soon as it exists."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.auto import AutoHfQuantizer

    config = config_of(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    quantizer: Any = None
    if "quantization_config" in options:
        quantizer = AutoHfQuantizer.from_config(options["quantization_config"], pre_quantized=False)
        quantizer.preprocess_model(model=model, device_map={"": 0}, dtype=torch.bfloat16, checkpoint_files=[])
    random = torch.Generator(device="cuda").manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        shape = parameter.shape
        norm = len(shape) == 1
        value = torch.ones(shape, device="cuda") if norm else torch.empty(shape, device="cuda")
        value = value.bfloat16() if norm else value.bfloat16().normal_(0, 0.02, generator=random)
        made = {name: torch.nn.Parameter(value, requires_grad=False)}
        if quantizer and quantizer.param_needs_quantization(model, name):
            made = quantizer.get_quantize_ops().convert({name: [value]}, full_layer_name=name, model=model)
        for target, weight in made.items():
            owner, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(owner), leaf, weight)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).cuda()
    return quantizer.postprocess_model(model) if quantizer else model


def ours(folder: Path, row: Row, layers: int) -> tuple[Any, str]:
    """Return the model of a row of finetune or of plain PEFT, and what is fused."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from finetune.autoconfig.compilation import Work
    from finetune.core.run_checks import RunChecks
    from finetune.hardware.detection import detect
    from finetune.kernels import attention_functions, kernel_limits
    from finetune.models import quantized_loading
    from finetune.quantization import stacked_experts
    from finetune.recipe.schema import Speed
    from finetune.speed import apply_to_model, fused_experts, lm_head_loss

    attention_functions.register("cudnn")
    options = quantized_loading.options(config_of(layers), None, row.storage, torch.bfloat16)
    attention = kernel_limits.IMPLEMENTATIONS["cudnn"]
    if layers == LAYERS:
        options |= {"dtype": torch.bfloat16, "attn_implementation": attention, "device_map": {"": 0}}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    else:
        model = create(layers, options, attention)
    loaded()
    lora = LoraConfig(
        r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=EXPERTS if row.experts else None
    )
    with torch.device("cuda"), stacked_experts.plain_parameters(model):  # created there, which is faster
        model = get_peft_model(model, lora).train()
    fused_experts.install_quantized(model)
    fused_experts.choose_fp8(model, row.fp8_experts)
    fused = "auto" if row.fused else False
    speed = Speed(
        activation_checkpointing=row.checkpointing, offload="none", fused=fused, compile=row.compile
    )
    with torch.autocast("cuda", torch.bfloat16):
        choices = apply_to_model.apply(
            model, speed, Work(row.sequences * row.length, 1e20), detect(), RunChecks()
        )
    fp8 = row.fp8_loss or row.storage == "fp8"  # as `speed.loss: auto` chooses
    lm_head_loss.install(model, compiled=bool(row.compile), fp8=fp8)
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


def trl(name: str, folder: Path) -> dict[str, Any]:
    """Train with TRL's SFTTrainer and PEFT, and return the figures of `measure`."""
    from datasets import Dataset
    from gpu_peers import make_clock
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": 0}, experts_implementation="grouped_mm"
    )
    loaded()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=ATTENTION, target_parameters=EXPERTS)
    arguments = SFTConfig(
        output_dir="/tmp/experts-trl", max_steps=WARM_UP + STEPS, learning_rate=1e-4, max_length=LENGTH,
        per_device_train_batch_size=SEQUENCES, logging_steps=1, bf16=True, gradient_checkpointing=False,
        save_strategy="no", report_to="none", use_liger_kernel=TRL[name], router_aux_loss_coef=0.0,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, ((WARM_UP + STEPS) * SEQUENCES, LENGTH)).tolist()
    clock = make_clock()
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict({"input_ids": ids}), peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(folder), callbacks=[clock],
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = statistics.median(clock.seconds[WARM_UP:])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return {
        "row": name,
        "fused": name,
        "layers": LAYERS,
        "sequences": SEQUENCES,
        "length": LENGTH,
        "tokens_per_second": round(SEQUENCES * LENGTH / seconds),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **LOADED,
        "trainable_parameters": sum(parameter.numel() for parameter in trained),
        "losses": [round(float(clock.loss), 4)],
    }


def measure(name: str, folder: Path, layers: int, *, profile: bool) -> dict[str, Any]:
    """Train a row and return its figures."""
    if name in TRL:
        return trl(name, folder)
    begun = time.monotonic()
    peer = name in UNSLOTH
    row = Row() if peer else ROWS[name]
    sequences, length = row.sequences, row.length
    model, fused = unsloth(folder, four_bit=UNSLOTH[name]) if peer else ours(folder, row, layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    random = torch.Generator(device="cuda").manual_seed(1)
    setup = time.monotonic() - begun

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        ids = torch.randint(VOCABULARY, (sequences, length), device="cuda", generator=random)
        count = sequences * (length - 1)
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
        "layers": layers,
        "sequences": sequences,
        "length": length,
        "tokens_per_second": round(sequences * length / milliseconds * 1000),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **LOADED,
        "setup_s": round(setup, 1),
        "trainable_parameters": sum(parameter.numel() for parameter in trained),
        "losses": [round(float(loss), 4) for loss in losses],
    }


NAMES = {
    "bf16": "finetune, bf16",
    "fp8": "finetune, fp8 base model",
    "fp8-dequantized": "finetune, fp8 base model, experts dequantized for each GEMM (older code)",
    "nf4": "finetune, NF4 base model",
    "nf4-fp8-experts": "finetune, NF4 base model, `speed.fp8_experts: true`",
    "nf4-fp8-experts-loss": "the same with `speed.loss: chunked_fp8`",
    "int8": "finetune, int8",
    "bf16-graphs": "finetune, bf16, CUDA graphs",
    "bf16-2048": "finetune, bf16, 1 x 2,048 tokens",
    "bf16-2048-graphs": "the same with CUDA graphs",
    "nf4-2048": "finetune, NF4, 1 x 2,048 tokens",
    "nf4-2048-graphs": "the same with CUDA graphs",
    "nf4-full-attention-1": "finetune, NF4, 48 layers, LoRA on attention, 1 x 4,096 tokens, recomputed",
    "nf4-full-1": "finetune, NF4, 48 layers, LoRA on attention and experts, 1 x 4,096 tokens, recomputed",
    "fp8-full": "finetune, fp8, 48 layers, LoRA on attention and experts, recomputed",
    "fp8-full-dequantized": "the same with experts dequantized for each GEMM (older code)",
    "bf16-full": "finetune, bf16, 48 layers, LoRA on attention and experts, recomputed",
    "unsloth": "Unsloth 2026.10.9, bf16",
    "unsloth-nf4": "Unsloth 2026.10.9, NF4",
    "peft": "PEFT, bf16",
    "trl": "TRL + PEFT, bf16",
    "trl+liger": "TRL + PEFT + Liger kernels, bf16",
}


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/reference/benchmarks.md."""
    lines = ["| | GPU | call | tokens/s | peak GiB | base model GiB | peak of loading GiB | last loss |"]
    lines.append("|" + "---|" * 8)
    for name, row in measured.items():
        kind = name.partition(",")[0]
        gpu = row["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
        cells = [NAMES.get(kind, kind), gpu, row["call"], f"{row['tokens_per_second']:,}"]
        cells += [row["peak_gib"] or "", row["loaded_gib"], row["loading_peak_gib"], row["last_loss"] or ""]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def short_table(measured: dict[str, dict[str, Any]]) -> str:
    """Return the table of the README: finetune next to TRL and Unsloth, from one call on one GPU."""
    call = max(row["call"] for name, row in measured.items() if name.startswith("trl"))
    rows = {name.partition(",")[0]: row for name, row in measured.items() if row["call"] == call}
    title = "6 of the 48 layers of Qwen3-30B-A3B, LoRA on attention and experts"
    head = f"{title}, {rows['bf16']['gpu']}, 4 x 4,096 tokens per step"
    lines = [f"| {head} | tokens/s | peak GiB |", "|---|---|---|"]
    for name in ("bf16", "fp8", "nf4", "unsloth", "unsloth-nf4", "trl"):
        row = rows[name]
        lines.append(f"| {NAMES[name]} | {row['tokens_per_second']:,} | {row['peak_gib']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", default=[*ROWS, *UNSLOTH, *TRL])
    parser.add_argument("--model", type=Path, default=Path("/tmp/experts"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--here", action="store_true", help="run the row in this process")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--cap", type=float, help="GiB of GPU memory")
    given = parser.parse_args()
    if given.cap:
        whole = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(given.cap / whole)
    if given.layers == LAYERS and not (given.model / "config.json").exists():
        write(given.model, LAYERS)
        gc.collect()
        torch.cuda.empty_cache()
    if given.here:
        row = measure(given.rows[0], given.model, given.layers, profile=given.profile)
        print(json.dumps({**row, "cap_gib": given.cap}), flush=True)
        return
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}), flush=True)
    for name in given.rows:  # each in a process of its own, because Unsloth changes transformers
        options = ["--profile"] if given.profile else []
        options += ["--layers", str(given.layers)]
        options += ["--cap", str(given.cap)] if given.cap else []
        call = [sys.executable, __file__, "--here", "--model", str(given.model), *options, name]
        subprocess.run(call, check=False)


if __name__ == "__main__":
    main()
