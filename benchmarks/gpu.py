"""Measure the speed of `finetune train` and of its peers on one GPU, with the sizes of LLaMA models.

    python benchmarks/gpu.py --rows lora-bf16,lora-fp8,dora-fp8,trl,trl+liger [--layers 32] [--out FOLDER]

The models have random weights, which the script creates once in --work. The text is random words. By default,
a row trains LoRA r=16 on all linear layers of Llama-3.1-8B's sizes with AdamW. A step has 16,384 tokens, in
sequences of 4,096. Each row runs in a process of its own: `finetune train`, TRL's SFTTrainer, or SFTTrainer
on Unsloth's model, as their documentation shows them.

The script reports tokens/s without padding, from the median of the steps after warm-up. It also reports the
peak memory of the allocator and the loss of the last step. The names of rows mean:

*-packed       documents of real lengths: log-normal, with a mean of 400 and a median of 245 tokens
*-recomputed   full activation checkpointing
*-small        full activation checkpointing, with the inputs of the layers in CPU memory
*-mlp          recomputed norms, gate and up
*-int8         recomputed norms; gate and up are kept in int8
*-mlp-small    as *-mlp, with the other saved activations in CPU memory
*-graphs       CUDA graphs, which `auto` does not choose for passes of this size
*-no-graphs    no CUDA graphs, where `auto` chooses them
*-fa4, -fa3    FlashAttention 4 or 3
*-cudnn        attention by cuDNN
1b-*           the sizes of Llama-3.2-1B, to see whether fp8 helps layers of width 2,048
135m-*         the sizes of SmolLM2-135M, the smallest model of the comparison with plans
lora-auto      no key of `speed`, in a run that is long enough for `auto` to compile
full-bf16      full fine-tuning of 8 layers: fp32 weights, GEMMs in bf16 (trl-full: bf16 weights)
70b-fp8        the sizes of Llama-3-70B: an fp8 checkpoint (68 GiB), sequences of 8,192, LoRA on attention
70b-fp8-half   gate and up in int8, and the other activations of half of the layers in CPU memory
cap-24         8B LoRA on sequences of 2,048, with 24 GiB for the allocator
cap-48         70B QLoRA on an NF4 checkpoint (37 GiB), sequences of 2,048, with 48 GiB
24gb_fastest   a recipe of recipes/gpus in the memory of its GPU, with packed sequences of 2,048

The script removes a 70B checkpoint after the last row that reads it, so --work may be a tmpfs. If a row
fails, the script records the error from its log and continues. Rows that OUT/gpu.json already has stay there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # a checkout need not be installed
RESULTS = HERE / "gpu.json"
WARM = 4  # steps
TINY = 64  # times shorter rows, to try a row on the CPU


class Row(NamedTuple):
    changes: tuple[str, ...] = ()
    """Overrides of the recipe, for finetune's rows."""
    model: str = "8b-bf16"
    """Shape and storage of the checkpoint."""
    layers: int | None = None
    """At most; `None`: --layers, or all for 70B."""
    length: int = 4096
    batch: int = 4
    """Rows of `length` tokens in a step."""
    packed: bool = False
    cap_gib: float | None = None
    steps: int = 0
    """At least."""
    recipe: str = ""
    """In recipes/gpus, in place of this file's own."""


WHOLE = ("speed.compile=true", "speed.activation_checkpointing=none")
SMALL = ("speed.compile=true", "speed.activation_checkpointing=full")
GRAPHS = ("speed.compile=reduce-overhead", "speed.activation_checkpointing=none")
HALF = ("speed.compile=true", "speed.activation_checkpointing=mlp")
INT8 = ("speed.compile=true", "speed.activation_checkpointing=mlp_int8")
AWAY = "speed.offload=activations"
OFFLOADED = (*SMALL, AWAY)
FULL = ("adapter.type=full", "train.learning_rate=1e-5", "train.save_strategy=no")
ATTENTION = "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj]"
ROWS = {
    "lora-bf16": Row(("model.quantization=none", *WHOLE)),
    "lora-fp8": Row(("model.quantization=fp8", *WHOLE)),
    "lora-auto": Row(steps=100),
    "dora-bf16": Row(("adapter.type=dora", "model.quantization=none", *WHOLE)),
    "dora-fp8": Row(("adapter.type=dora", "model.quantization=fp8", *WHOLE)),
    "adalora-bf16": Row(("adapter.type=adalora", "model.quantization=none", *WHOLE)),
    "adalora-fp8": Row(("adapter.type=adalora", "model.quantization=fp8", *WHOLE)),
    "ia3-bf16": Row(("adapter.type=ia3", "model.quantization=none", *WHOLE)),
    "ia3-fp8": Row(("adapter.type=ia3", "model.quantization=fp8", *WHOLE)),
    "qlora": Row(("adapter.type=qlora", *WHOLE)),
    "lora-bf16-recomputed": Row(("model.quantization=none", *SMALL)),
    "lora-fp8-recomputed": Row(("model.quantization=fp8", *SMALL)),
    "lora-bf16-mlp": Row(("model.quantization=none", *HALF)),
    "lora-fp8-mlp": Row(("model.quantization=fp8", *HALF)),
    "lora-fp8-int8": Row(("model.quantization=fp8", *INT8)),
    "lora-bf16-small": Row(("model.quantization=none", *OFFLOADED)),
    "lora-fp8-small": Row(("model.quantization=fp8", *OFFLOADED)),
    "lora-bf16-mlp-small": Row(("model.quantization=none", *HALF, AWAY)),
    "lora-fp8-mlp-small": Row(("model.quantization=fp8", *HALF, AWAY)),
    "lora-bf16-graphs": Row(("model.quantization=none", *GRAPHS)),
    "lora-fp8-graphs": Row(("model.quantization=fp8", *GRAPHS)),
    "dora-fp8-graphs": Row(("adapter.type=dora", "model.quantization=fp8", *GRAPHS)),
    "qlora-graphs": Row(("adapter.type=qlora", *GRAPHS)),
    "1b-bf16": Row(("model.quantization=none", *WHOLE), "1b-bf16"),
    "1b-fp8": Row(("model.quantization=fp8", *WHOLE), "1b-bf16"),
    "135m-bf16": Row(("model.quantization=none", *WHOLE), "135m-bf16"),
    "135m-full": Row((*FULL, *WHOLE), "135m-bf16"),
    "lora-bf16-packed": Row(("model.quantization=none", "data.packing=true", *WHOLE), packed=True),
    "lora-fp8-packed": Row(("model.quantization=fp8", "data.packing=true", *WHOLE), packed=True),
    "135m-bf16-packed": Row(
        ("model.quantization=none", "data.packing=true", *WHOLE), "135m-bf16", packed=True
    ),
    "full-bf16": Row((*FULL, *WHOLE), layers=8),
    "70b-fp8": Row(("model.quantization=fp8", *HALF, ATTENTION), "70b-fp8", length=8192, batch=1),
    "70b-fp8-auto": Row(
        ("model.quantization=fp8", "speed.compile=true", ATTENTION), "70b-fp8", length=8192, batch=1
    ),
    "70b-fp8-int8": Row(("model.quantization=fp8", *INT8, AWAY, ATTENTION), "70b-fp8", length=8192, batch=1),
    "70b-fp8-half": Row(
        ("model.quantization=fp8", *INT8, f"{AWAY}:40", ATTENTION), "70b-fp8", length=8192, batch=1
    ),
    "cap-24": Row(("speed.compile=true",), length=2048, batch=8, cap_gib=24),
    "cap-48": Row(("adapter.type=qlora", "speed.compile=true"), "70b-nf4", length=2048, batch=1, cap_gib=48),
}
KERNELS = {"fa4": "flash_attention_4", "fa3": "flash_attention_3", "cudnn": "cudnn"}
ROWS |= {
    f"lora-{base}-{short}": Row((f"model.quantization={stored}", f"model.attention={kernel}", *WHOLE))
    for base, stored in {"bf16": "none", "fp8": "fp8"}.items()
    for short, kernel in KERNELS.items()
}
CAPS = {
    "24gb": 22.0,
    "32gb": 31.4,
    "40gb": 39.4,
    "80gb": 79.1,
    "141gb": 139.8,
}  # the least of finetune/hardware/gpus.py
RECIPES = {
    f"{size}_{kind}": Row(length=2048, batch=8, packed=True, cap_gib=gib, recipe=f"{size}_{kind}.yaml")
    for size, gib in CAPS.items()
    for kind in ("fastest", "balanced", "smallest")
}
RECIPES["141gb_fastest"] = RECIPES["141gb_fastest"]._replace(batch=16)  # it has so many at once
NO_GRAPHS = ("speed.compile=default",)
RECIPES |= {
    f"{name}-no-graphs": RECIPES[name]._replace(changes=NO_GRAPHS)
    for name in ("24gb_fastest", "32gb_fastest", "32gb_balanced")
}
SMALLEST = ROWS["135m-bf16-packed"]
ROWS["135m-bf16-no-graphs-packed"] = SMALLEST._replace(changes=(*SMALLEST.changes, *NO_GRAPHS))
PEERS = {  # a name lists the enabled options
    "trl": Row(),
    "trl+checkpointing": Row(),
    "trl+liger": Row(),
    "trl+liger+checkpointing": Row(),
    "trl-dora+liger": Row(),
    "trl-qlora+liger": Row(),
    "trl-qlora+liger+checkpointing": Row(),
    "trl-full": Row(layers=8),
    "trl-full+liger": Row(layers=8),
    "trl-full-fp32+liger": Row(layers=8),
    "unsloth": Row(),
    "unsloth+checkpointing": Row(),
    "unsloth-qlora": Row(),
}
RECIPE = """
model: {{name: {model}}}
data: {{name: {data}, format: text, max_length: {length}, train_on: all, too_long: split}}
adapter: {{type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}}
train: {{max_steps: {steps}, effective_batch_size: {batch}, per_device_train_batch_size: {batch},
  learning_rate: 1.0e-4, logging_steps: 1, output_dir: {folder}}}
eval: {{forgetting: false, samples: 0}}
"""


class Job(NamedTuple):
    """One row, ready to run."""

    name: str
    model: Path
    data: Path
    length: int
    batch: int
    steps: int
    row: Row
    out: Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--layers", type=int, help="at most so many, in every row")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        job = plan(options.one, options)
        row = theirs(job) if job.name in PEERS else ours(job)
        (job.out / f"{job.name}.json").write_text(json.dumps(row))
    else:
        run(options.rows.split(","), options)


def plan(name: str, options: Any) -> Job:
    """Return the inputs of a row, with its paths and sizes."""
    row = {**ROWS, **RECIPES, **PEERS}[name]
    shape, stored = row.model.split("-")
    shape, shorter = ("tiny", TINY) if options.tiny else (shape, 1)
    whole = {"70b": 80, "135m": 30, "1b": 16}.get(shape, 32)
    layers = min(n for n in (row.layers, options.layers, whole) if n)
    length, steps = row.length // shorter, max(options.steps, 0 if options.tiny else row.steps)
    kind = "documents" if row.packed else "text"
    data = options.work / f"{kind}-{(steps + 2) * row.batch * length}.jsonl"
    model = options.work / f"{shape}-{stored}-{layers}"
    return Job(name, model, data, length, row.batch, steps, row, options.out)


def run(names: list[str], options: Any) -> None:
    """Each row in a process of its own; gpu.json is written after each."""
    from gpu_inputs import make_data, make_model

    jobs = [plan(name, options) for name in names]
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    found = options.out / "gpu.json"
    measured = json.loads(found.read_text()) if found.exists() else {}
    passed = ["--steps", options.steps, "--work", options.work, "--out", options.out]
    passed += [*(["--layers", options.layers] if options.layers else []), *(["--tiny"] * options.tiny)]
    for index, job in enumerate(jobs):
        shape, stored, layers = job.model.name.split("-")
        make_model(job.model, shape, stored, int(layers))
        make_data(job.data, (job.steps + 2) * job.batch * job.length, documents=job.row.packed)
        started, log = time.perf_counter(), options.out / f"{job.name}.log"
        with log.open("w") as file:
            command = [sys.executable, __file__, "--one", job.name, *map(str, passed)]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        row = json.loads((options.out / f"{job.name}.json").read_text()) if code == 0 else failure(code, log)
        measured[job.name] = {**row, "process_seconds": time.perf_counter() - started}
        found.write_text(json.dumps(measured, indent=1) + "\n")
        print(job.name, measured[job.name], flush=True)
        if shape == "70b" and all(job.model != later.model for later in jobs[index + 1 :]):
            shutil.rmtree(job.model)  # of a tmpfs, which has no room for two
    print(table(measured))


def failure(code: int, log: Path) -> dict[str, Any]:
    """Why a row failed: our error with what was found, or the last line of its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    said = lines[errors[-1] :] if errors else lines[-1:]
    return {"failed": code, "reason": "; ".join(said)[:300] or "nothing was said"}


def ours(job: Job) -> dict[str, Any]:
    """`finetune train`, in this process, and what its metrics say."""
    import torch

    from finetune.cli import main as cli_main

    if job.row.cap_gib and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(job.row.cap_gib * 2**30 / whole)
    folder, recipe = job.out / "runs" / job.name, job.out / f"{job.name}.yaml"
    sizes = {"length": job.length, "batch": job.batch, "steps": job.steps}
    recipe.write_text(RECIPE.format(model=job.model, data=job.data, folder=folder, **sizes))
    given = [str(recipe), *job.row.changes]
    if job.row.recipe:
        given = [str(HERE.parent / "recipes" / "gpus" / job.row.recipe), *of_recipe(job, folder)]
        given += job.row.changes
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if code := cli_main.main(["train", *given]):
            sys.exit(code)
    finally:
        for big in ("adapter", "model", "checkpoints"):
            shutil.rmtree(folder / big, ignore_errors=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    real = (steps[-1]["tokens"] - steps[WARM - 1]["tokens"]) / (len(steps) - WARM)
    run_checks = json.loads((folder / "checks.json").read_text())
    attention = next(one["actual"] for one in run_checks if one["option"] == "model.attention")
    peak, seconds = steps[-1]["gpu_memory_gib"], [line["step_seconds"] for line in steps]
    return result(job, seconds, steps[-1]["loss"], peak, attention=attention, real=real)


def of_recipe(job: Any, folder: Path) -> list[str]:
    """What a shipped recipe is given here, by a Job of this file or of multi_gpu.py: this model, texts, fewer
    rows a step."""
    data = [f"data.name={job.data}", "data.format=text", "data.train_on=all", "data.too_long=split"]
    data += ["data.validation_fraction=null", "eval.forgetting=false", "eval.samples=0"]
    train = [
        f"train.max_steps={job.steps}",
        f"train.effective_batch_size={job.batch}",
        "train.warmup_steps=2",
    ]
    return [
        f"model.name={job.model}",
        *data,
        *train,
        f"data.max_length={job.length}",
        f"train.output_dir={folder}",
    ]


def theirs(job: Job) -> dict[str, Any]:
    """A peer's row: TRL's SFTTrainer with PEFT, or on Unsloth's model."""
    import gpu_peers

    seconds, loss, peak, attention = gpu_peers.train(job)
    return result(job, seconds, loss, peak, attention=f"{attention} (as set)")


def result(
    job: Job, seconds: list[float], loss: float, peak: float | None, *, attention: str, real: float = 0.0
) -> dict[str, Any]:
    """A row of gpu.json; `real`: tokens of a step, if not all that are asked for."""
    import torch

    asked, median = job.batch * job.length, statistics.median(seconds[WARM:])
    return {
        "tokens_per_second": (real or asked) / median,
        "tokens_per_step": asked,
        "real_tokens_per_step": real or asked,
        "step_seconds": median,
        "first_step_seconds": seconds[0],
        "peak_gib": peak or 0.0,
        "loss": loss,
        "steps": len(seconds) - WARM,
        "attention": attention,
        "layers": int(job.model.name.rpartition("-")[2]),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def table(measured: dict[str, dict[str, Any]]) -> str:
    """The measured rows as a markdown table."""
    lines = [
        "| | tokens/s | tokens a step | step, s | peak GiB | last loss | first step, s | attention "
        "| GPU, torch, date |",
        "|---|" + "---|" * 8,
    ]
    for name, row in measured.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['reason'].replace('|', '/')} |" + " |" * 7)
            continue
        tokens = row.get("tokens_per_step", 16384)
        real = row.get("real_tokens_per_step", tokens)
        held = f"{tokens:,}" if real == tokens else f"{real:,.0f} of {tokens:,}"
        where = f"{row['gpu']}, {row['torch'].partition('+')[0]}, {row['date']}"
        lines.append(
            f"| {name} | {row['tokens_per_second']:,.0f} | {held} | {row['step_seconds']:.3f} "
            f"| {row['peak_gib']:.1f} | {row['loss']:.3f} | {row['first_step_seconds']:.0f} "
            f"| {row.get('attention', '')} | {where} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
