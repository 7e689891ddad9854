"""Speed on one GPU: `finetune train` and its peers on an 8B Llama, side by side, into gpu.json and a table.

    python benchmarks/gpu.py --rows lora-bf16,lora-fp8,dora-fp8,trl,trl+liger [--layers 32] [--out FOLDER]

The model is Llama-3.1-8B's shape with random weights (made once in --work), the data random words in rows of
4,096 tokens; 16,384 tokens a step, LoRA r=16 on all linear layers, AdamW. Each row is a process of its own:
the whole `finetune train` with the Trainer's loop, or TRL's SFTTrainer as documented. Reported
are the median of the steps after warm-up, the allocator's peak, and the loss of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH, BATCH, WARM = 4096, 4, 4
ROWS: dict[str, list[str]] = {  # of ours: what is overridden
    "lora-bf16": ["speed.base=bf16"],
    "lora-fp8": ["speed.base=fp8"],
    "dora-bf16": ["adapter.type=dora", "speed.base=bf16"],
    "dora-fp8": ["adapter.type=dora", "speed.base=fp8"],
    "adalora-fp8": ["adapter.type=adalora", "speed.base=fp8"],
    "ia3-fp8": ["adapter.type=ia3", "speed.base=fp8"],
    "qlora": ["adapter.type=qlora"],
    "lora-bf16-recomputed": ["speed.base=bf16", "speed.recompute=all"],
    "lora-fp8-recomputed": ["speed.base=fp8", "speed.recompute=all"],
}
PEERS = ("trl", "trl+checkpointing", "trl+liger", "trl-dora+liger")
RECIPE = """
model: {{name: {model}}}
data: {{name: {data}, format: text, max_length: {length}, train_on: all, too_long: split}}
adapter: {{type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}}
speed: {{compile: true, recompute: none}}
train: {{max_steps: {steps}, effective_batch_size: {batch}, per_device_train_batch_size: {batch},
  learning_rate: 1.0e-4, logging_steps: 1, output_dir: {folder}}}
eval: {{general: false, samples: 0}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = peer(options) if options.one in PEERS else ours(options)
        (options.out / f"{options.one}.json").write_text(json.dumps(row))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    make_model(options.work / "model", options.layers)
    make_data(options.work / "data.jsonl", options.steps)
    measured = {}
    for name in options.rows.split(","):
        started = time.perf_counter()
        given = ["--layers", options.layers, "--steps", options.steps, "--work", options.work]
        command = [sys.executable, __file__, "--one", name, *map(str, given), "--out", str(options.out)]
        with (options.out / f"{name}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        found = options.out / f"{name}.json"
        row = json.loads(found.read_text()) if code == 0 else {"failed": code}
        measured[name] = {**row, "process_seconds": time.perf_counter() - started}
        print(name, measured[name], flush=True)
    (options.out / "gpu.json").write_text(json.dumps(measured, indent=1) + "\n")


def ours(options: Any) -> dict[str, Any]:
    """`finetune train`, in this process, and what its metrics say."""
    from finetune import cli

    folder = options.out / "runs" / options.one
    paths = {"model": options.work / "model", "data": options.work / "data.jsonl", "folder": folder}
    recipe = options.work / f"{options.one}.yaml"
    recipe.write_text(RECIPE.format(**paths, length=LENGTH, batch=BATCH, steps=options.steps))
    code = cli.main(["train", str(recipe), *ROWS[options.one]])
    if code:
        sys.exit(code)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    return result([line["step_seconds"] for line in steps], steps[-1]["loss"], steps[-1]["gpu_memory_gib"])


def peer(options: Any) -> dict[str, Any]:
    """TRL's SFTTrainer with PEFT, as their documentation shows it."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.loss = float("nan")

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.begun)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.loss = logs.get("loss", self.loss)

    dora = "dora" in options.one
    recompute = "checkpointing" in options.one or dora
    folder, tokenizer = options.work / "model", AutoTokenizer.from_pretrained(options.work / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": 0})
    texts = [json.loads(line)["text"] for line in (options.work / "data.jsonl").read_text().splitlines()]
    ids = [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    rows = [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH, LENGTH)][: options.steps * BATCH]
    checkpointing = {"gradient_checkpointing": recompute}
    clock = Clock()
    arguments = SFTConfig(
        output_dir=str(options.out / "runs" / options.one), max_steps=options.steps, learning_rate=1e-4,
        per_device_train_batch_size=2 if dora else BATCH, gradient_accumulation_steps=2 if dora else 1,
        bf16=True, max_length=LENGTH, logging_steps=1, save_strategy="no", report_to="none",
        use_liger_kernel="liger" in options.one, **checkpointing,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", use_dora=dora),
        callbacks=[clock],
    )
    trainer.train()
    return result(clock.seconds, clock.loss, torch.cuda.max_memory_allocated() / 2**30)


def result(seconds: list[float], loss: float, peak: float) -> dict[str, Any]:
    import torch

    median = statistics.median(seconds[WARM:])
    return {
        "tokens_per_second": LENGTH * BATCH / median,
        "step_seconds": median,
        "first_step_seconds": seconds[0],
        "peak_gib": peak,
        "loss": loss,
        "steps": len(seconds) - WARM,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(measured: dict[str, dict[str, Any]]) -> str:
    """The measured rows as a markdown table."""
    lines = [
        "| | tokens/s | step, s | peak GiB | last loss | first step, s | GPU, torch, date |",
        "|---|" + "---|" * 6,
    ]
    for name, row in measured.items():
        where = f"{row['gpu']}, {row['torch'].partition('+')[0]}, {row['date']}"
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {row['step_seconds']:.3f} | {row['peak_gib']:.1f} "
            f"| {row['loss']:.3f} | {row['first_step_seconds']:.0f} | {where} |"
        )
    return "\n".join(lines) + "\n"


def make_model(folder: Path, layers: int) -> None:
    """Llama-3.1-8B's shape with random weights, and the embedded example's tokenizer."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, max_position_embeddings=8192,
        rms_norm_eps=1e-5, dtype="bfloat16", tie_word_embeddings=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = Path(__file__).parents[1] / "examples" / "tiny_llama" / "model"
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    torch.set_default_dtype(torch.float32)


def make_data(path: Path, steps: int) -> None:
    """One text of random words, which is split into rows: about 2.7 tokens a word."""
    import random

    random.seed(0)
    words = [f"{a}{b}{c}" for a in "bcdfgklm" for b in "aeiou" for c in "nrst"]
    text = " ".join(random.choices(words, k=(steps + 2) * BATCH * LENGTH // 2))
    path.write_text(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
