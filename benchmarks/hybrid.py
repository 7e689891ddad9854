"""Measure `finetune train` and TRL on a model with linear attention, on one GPU, with the same kernels.

    python benchmarks/hybrid.py [--rows lora,trl] [--layers 8] [--out FOLDER]

The model has the sizes of Qwen3.5-9B and random weights: three of four layers are gated delta nets. All rows
train LoRA r=16 on attention, MLP and the projections of the delta nets, without activation checkpointing.
A step has four sequences of 4,096 tokens. transformers takes `causal-conv1d` and `flash-linear-attention` on
both sides if they are installed. Each row runs in a process of its own. The names of rows mean:

*-packed    documents of real lengths, packed
*-eager     without torch.compile
*-fp8       the base model is stored in fp8, and its GEMMs run in fp8. The other rows are in bf16.
trl         TRL's SFTTrainer; trl+liger: with Liger's kernels
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

VOCABULARY, LENGTH, SEQUENCES = 248_320, 4096, 4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj"]
TARGETS += ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
COMMON = (f"adapter.target_modules=[{', '.join(TARGETS)}]", "speed.activation_checkpointing=none")
BF16 = (*COMMON, "model.quantization=none")
ROWS = {
    "lora": gpu.Row((*BF16, "speed.compile=true")),
    "lora-eager": gpu.Row((*BF16, "speed.compile=false")),
    "lora-fp8": gpu.Row((*COMMON, "model.quantization=fp8", "speed.compile=true")),
    "lora-packed": gpu.Row((*BF16, "speed.compile=true", "data.packing=true"), packed=True),
    "trl": gpu.Row(),
    "trl+liger": gpu.Row(),
}


def write(folder: Path, layers: int) -> None:
    """Write a checkpoint with random weights, unless it exists."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (folder / "config.json").exists():
        return
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=layers, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gpu_inputs.TOKENIZER).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def job_of(name: str, options: Any) -> gpu.Job:
    """Return the inputs of a row."""
    row = ROWS[name]
    kind = "documents" if row.packed else "text"
    data = options.work / f"{kind}-hybrid.jsonl"
    model = options.work / f"qwen3.5-bf16-{options.layers}"
    return gpu.Job(name, model, data, LENGTH, SEQUENCES, options.steps, row, options.out)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/hybrid"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = job_of(options.one, options)
        row = peer(job) if options.one.startswith("trl") else gpu.ours(job)
        row["kernels"] = kernels()
        (options.out / f"{options.one}.json").write_text(json.dumps(row))
        return
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    measured: dict[str, Any] = {}
    for name in options.rows.split(","):
        job = job_of(name, options)
        write(job.model, options.layers)
        tokens = (options.steps + 2) * SEQUENCES * LENGTH
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
    (options.out / "hybrid.json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
