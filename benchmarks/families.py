"""Measure `finetune train` and TRL on models that gpu.py does not have, on one GPU.

    python benchmarks/families.py [--rows qwen3.5-lora,qwen3.5-trl] [--layers 8] [--out FOLDER]

The models have random weights. No row of `qwen3.5` uses activation checkpointing, and a step has four
sequences of 4,096 tokens:

qwen3.5-*   Qwen3.5-9B's sizes: three of four layers are gated delta nets. LoRA r=16 on attention, MLP and the
            projections of the delta nets. transformers takes `causal-conv1d` and `flash-linear-attention` on
            both sides if they are installed.
gpt-oss-*   gpt-oss-20b's sizes with all 24 layers, experts in mxfp4. LoRA r=16 on attention, one sequence of
            4,096 tokens, 24 GiB for the allocator.

*-packed    documents of real lengths, packed.
*-eager     without torch.compile.
*-fp8       the linear layers of the base model are stored in fp8, and their GEMMs run in fp8.
*-bf16      the experts are dequantized to bf16, without a limit of the memory.
*-trl       TRL's SFTTrainer; *-trl+liger: with Liger's kernels.

Each row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu
import gpu_inputs
import torch
from safetensors.torch import save_file

QWEN, OSS = "qwen3.5", "gpt-oss"
VOCABULARY, LENGTH = 248_320, 4096
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj"]
TARGETS += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
COMMON = (f"adapter.target_modules=[{', '.join(TARGETS)}]", "speed.activation_checkpointing=none")
BF16 = (*COMMON, "model.quantization=none")
OSS_LAYERS, CAP = 24, 24.0
ROWS = {
    "qwen3.5-lora": gpu.Row((*BF16, "speed.compile=true")),
    "qwen3.5-lora-eager": gpu.Row((*BF16, "speed.compile=false")),
    "qwen3.5-lora-fp8": gpu.Row((*COMMON, "model.quantization=fp8", "speed.compile=true")),
    "qwen3.5-lora-packed": gpu.Row((*BF16, "speed.compile=false", "data.packing=true"), packed=True),
    "qwen3.5-trl": gpu.Row(),
    "qwen3.5-trl+liger": gpu.Row(),
    "gpt-oss-qlora": gpu.Row(("adapter.type=qlora",), batch=1, cap_gib=CAP),
    "gpt-oss-fp8": gpu.Row(("model.quantization=fp8",), batch=1, cap_gib=CAP),
    "gpt-oss-bf16": gpu.Row(("model.quantization=none",), batch=1),
}


def write(folder: Path, layers: int) -> None:
    """Write a checkpoint with random weights, unless it exists."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return
    if folder.name.startswith(OSS):
        write_gpt_oss(folder)
        return
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=layers, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gpu_inputs.TOKENIZER).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def write_gpt_oss(folder: Path, **sizes: int) -> None:
    """Write a checkpoint of gpt-oss-20b's sizes, with experts in mxfp4, one file for each layer.

    Args:
        sizes: Values of the config to change, to try it without a GPU.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sizes = {"num_hidden_layers": OSS_LAYERS, "num_local_experts": 32, **sizes}
    config: Any = AutoConfig.for_model("gpt_oss", **sizes)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, torch.Tensor]] = {}
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{part}.safetensors", {}).update(random_tensors(name, parameter))
    for file, tensors in files.items():
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    AutoTokenizer.from_pretrained(gpu_inputs.TOKENIZER).save_pretrained(folder)
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    text = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": stored}, indent=1))
    torch.cuda.empty_cache()


def random_tensors(name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return random values of a parameter by their names in a checkpoint: mxfp4 for stacked experts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if parameter.dim() < 3:
        made = torch.empty(parameter.shape, device=device, dtype=torch.bfloat16)
        made = made.fill_(1) if "norm" in name else made.normal_(0, gpu_inputs.STD)
        return {name: made.cpu()}
    experts, inputs, outputs = parameter.shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), device=device, dtype=torch.uint8)
    scales = torch.full((experts, outputs, inputs // 32), 120, dtype=torch.uint8)  # std 0.02
    return {f"{name}_blocks": blocks.cpu(), f"{name}_scales": scales}


def job_of(name: str, options: Any) -> gpu.Job:
    """Return the inputs of a row."""
    row = ROWS[name]
    kind = "documents" if row.packed else "text"
    data = options.work / f"{kind}-{(options.steps + 2) * row.batch * LENGTH}.jsonl"
    family, layers = (OSS, OSS_LAYERS) if name.startswith(OSS) else (QWEN, options.layers)
    model = options.work / f"{family}-{layers}"
    return gpu.Job(name, model, data, LENGTH, row.batch, options.steps, row, options.out)


def kernels() -> list[str]:
    """Return the packages with kernels for these layers that are installed."""
    from importlib.util import find_spec

    names = {"causal_conv1d": "causal-conv1d", "fla": "flash-linear-attention"}
    return [name for module, name in names.items() if find_spec(module)]


def peer(job: gpu.Job) -> dict[str, Any]:
    """Train a row with TRL's SFTTrainer."""
    import gpu_peers

    seconds, loss, peak, attention = gpu_peers.train(job, TARGETS)
    return gpu.result(job, seconds, loss, peak, attention=f"{attention} (as set)")


NAMES = {
    "qwen3.5-trl": "Qwen3.5-9B's sizes, 8 layers: TRL + PEFT, bf16",
    "qwen3.5-lora-eager": "the same with finetune, without torch.compile",
    "qwen3.5-lora-packed": "finetune, documents in packed sequences",
    "gpt-oss-qlora": "gpt-oss-20b's sizes, 24 layers: finetune, qlora",
    "gpt-oss-fp8": "the same in fp8",
    "gpt-oss-bf16": "the same, experts dequantized to bf16",
}


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return the table of docs/reference/benchmarks.md."""
    lines = ["| | call | tokens/s | tokens a step | peak GiB | first step, s | last loss | kernels |"]
    lines.append("|" + "---|" * 8)
    for name, row in measured.items():
        tokens = f"{row['real_tokens_per_step']:,.0f}"
        cells = [NAMES.get(name, name), row["call"], f"{row['tokens_per_second']:,.0f}", tokens]
        cells += [f"{row['peak_gib']:.1f}", f"{row['first_step_seconds']:.0f}", f"{row['loss']:.3f}"]
        lines.append("| " + " | ".join(map(str, [*cells, ", ".join(row["kernels"]) or "none"])) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/families"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = job_of(options.one, options)
        row = peer(job) if "-trl" in options.one else gpu.ours(job)
        row["kernels"] = kernels()
        (options.out / f"{options.one}.json").write_text(json.dumps(row))
        return
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Any] = {}
    for name in options.rows.split(","):
        job = job_of(name, options)
        write(job.model, options.layers)
        tokens = (options.steps + 2) * job.batch * LENGTH
        gpu_inputs.make_data(job.data, tokens, documents=job.row.packed)
        started, log = time.perf_counter(), options.out / f"{name}.log"
        passed = [f"--{key}={getattr(options, key)}" for key in ("layers", "steps", "work", "out")]
        with log.open("w") as file:
            command = [sys.executable, __file__, "--one", name, *passed]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        made = options.out / f"{name}.json"
        measured[name] = json.loads(made.read_text()) if code == 0 else gpu.failure(code, log)
        measured[name]["process_seconds"] = time.perf_counter() - started
        print(name, measured[name], flush=True)
    (options.out / "families.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
