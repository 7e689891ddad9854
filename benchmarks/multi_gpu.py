"""Measure the speed on several GPUs: run `finetune train` with the shipped launch configs.

    python benchmarks/multi_gpu.py --rows lora-bf16,lora-fp8 --gpus 1,2,4 [--layers 32] [--out FOLDER]
    python benchmarks/multi_gpu.py --rows 70b-fp8,70b-bf16-fsdp2 --gpus 4

The results are in multi_gpu.json. Models, data, recipe and settings are the same as in gpu.py.

A row is one launch of N processes. The micro-batch per process is fixed, so the work grows with the number
of GPUs. The script reports

- tokens/s of all GPUs, from the median of the steps after warm-up
- `x of one`: tokens/s compared with the same row on one GPU, if both were measured on the same day
- the peak memory of rank 0's allocator
- the bytes that DDP exchanged
- the last loss

Rows:

lora-*          8B, LoRA r=16 on all linear layers, 4 sequences of 4,096 tokens per GPU, DDP
70b-fp8         MLPerf's task: 70B, LoRA r=16 on attention, 8,192 tokens per GPU, DDP, fp8 base
70b-bf16-fsdp2  the same on a sharded bf16 base model. The checkpoint takes 132 GiB in --work
32k, 128k       8B on the fp8 base model, one sequence of that length per GPU. 128k offloads activations
128k-cp         one sequence of 131,072 tokens on all GPUs (context parallelism, FSDP2, bf16)
nccl            each setting of nccl.env that can matter on one machine, compared with no setting. 8 layers,
                DDP and FSDP2 (`--rows nccl --gpus 2`)
*-fsdp2 *-zero3 8B LoRA in bf16 with a sharded base model, to measure the cost of sharding compared with DDP
*-fsdp2-kept    the same without activation checkpointing, which `auto` does not choose on GPUs of 80 GB
full-*          8B, full fine-tuning
isc25           recipes/isc25/as_submitted.yaml: DoRA, FlashAttention 3, fp8, one GPU's share of 256
isc25-te        recipes/isc25/transformer_engine.yaml: 1B, full fine-tuning, TransformerEngine's fp8
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from gpu import ATTENTION, FULL, RECIPE, WARM, failure, of_recipe

RESULTS = Path(__file__).with_name("multi_gpu.json")
ROOT = Path(__file__).parents[1]
TINY = 64  # divides the sequence length, to try a row on CPUs


class Row(NamedTuple):
    config: str
    """The name of a file in accelerate_configs."""
    changes: tuple[str, ...]
    """Overrides of the recipe."""
    model: str = "8b-bf16"
    length: int = 4096
    batch: int = 4
    """Sequences of `length` tokens per process and step."""
    shared: bool = False
    """Whether all processes share each sequence."""
    layers: int | None = None
    variables: tuple[tuple[str, str], ...] = ()
    """Environment variables, as in accelerate_configs/nccl.env."""
    recipe: str = ""
    """The name of a shipped recipe. By default, the recipe of gpu.py."""


WHOLE = ("speed.compile=true", "speed.activation_checkpointing=none")
LONG = ("speed.compile=true", "model.quantization=fp8")
LARGE = ("speed.compile=true", ATTENTION)
ROWS = {
    "lora-bf16": Row("ddp_8", ("model.quantization=none", *WHOLE)),
    "lora-fp8": Row("8xh100_fp8", WHOLE),
    "dora-fp8": Row("8xh100_fp8", ("adapter.type=dora", *WHOLE)),
    "qlora": Row("ddp_8", ("adapter.type=qlora", *WHOLE)),
    "70b-fp8": Row("8xh100_fp8", LARGE, "70b-fp8", 8192, 1),
    "70b-bf16-fsdp2": Row("fsdp2_8", (ATTENTION, "speed.activation_checkpointing=full"), "70b-bf16", 8192, 1),
    "lora-bf16-fsdp2": Row("fsdp2_8", ("model.quantization=none",)),
    "lora-bf16-fsdp2-compiled": Row("fsdp2_8", ("model.quantization=none", "speed.compile=true")),
    "lora-bf16-fsdp2-kept": Row("fsdp2_8", ("model.quantization=none", *WHOLE)),
    "lora-fp8-fsdp2": Row("fsdp2_8_quantized", ("model.quantization=fp8",)),
    "qlora-fsdp2": Row("fsdp2_8_quantized", ("adapter.type=qlora",)),
    "lora-bf16-zero2": Row("zero2_8", ("model.quantization=none",)),
    "lora-bf16-zero3": Row("zero3_8", ("model.quantization=none",)),
    "full-fsdp2": Row("fsdp2_8", FULL, batch=2),
    "full-zero3": Row("zero3_8", FULL, batch=2),
    "full-torchao": Row("8xh100_fp8_torchao", FULL, batch=1, layers=8),
    "32k": Row("8xh100_fp8", LONG, length=32768, batch=1),
    "128k": Row("8xh100_fp8", (*LONG, "speed.offload=activations"), length=131072, batch=1),
    "128k-cp": Row(
        "context_parallel_4",
        ("model.quantization=none", "model.attention=sdpa", "speed.activation_checkpointing=full"),
        length=131072,
        batch=1,
        shared=True,
    ),
    # 16 sequences x 2 accumulation steps, as on eight GPUs
    "isc25": Row("8xh100_fp8", (), length=512, batch=32, recipe="isc25/as_submitted.yaml"),
    "isc25-te": Row(
        "8xh100_fp8_te",
        (),
        "1b-bf16",
        length=512,
        batch=32,
        layers=16,
        recipe="isc25/transformer_engine.yaml",
    ),
}


# Each setting of nccl.env that can change the speed on one machine, and a row without settings
NCCL = {
    "": {},
    "no-p2p": {"NCCL_P2P_DISABLE": "1"},
    "no-nvls": {"NCCL_NVLS_ENABLE": "0"},
    "trace": {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
    "debug": {"NCCL_DEBUG": "INFO"},
    "threads": {"OMP_NUM_THREADS": "8"},
}
for _row in ("lora-bf16", "lora-bf16-fsdp2"):
    for _name, _given in NCCL.items():
        ROWS[f"nccl-{_row}{'-' * bool(_name)}{_name}"] = ROWS[_row]._replace(
            layers=8, variables=tuple(_given.items())
        )


class Job(NamedTuple):
    """One row on a number of GPUs."""

    name: str
    gpus: int
    model: Path
    data: Path
    length: int
    row: Row
    steps: int
    out: Path

    @property
    def batch(self) -> int:
        """Return the number of sequences per step over all processes."""
        return self.row.batch * (1 if self.row.shared else self.gpus)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="lora-bf16,lora-fp8")
    parser.add_argument("--gpus", default="1,2,4")
    parser.add_argument("--layers", type=int, help="at most so many, in every row")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/multi-gpu"))
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from gpu_inputs import make_data, make_model

    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    found = options.out / "multi_gpu.json"
    measured = json.loads(found.read_text()) if found.exists() else {}
    named = [row for row in ROWS if row.startswith("nccl-")] if options.rows == "nccl" else None
    for name in named or options.rows.split(","):
        for gpus in map(int, options.gpus.split(",")):
            job = plan(name, gpus, options)
            shape, stored, layers = job.model.name.split("-")
            make_model(job.model, shape, stored, int(layers))
            make_data(job.data, (job.steps + 2) * job.batch * job.length, documents=False)
            key = f"{name} x{gpus}"
            measured[key] = launch(job, tiny=options.tiny)
            found.write_text(json.dumps(measured, indent=1) + "\n")
            print(key, measured[key], flush=True)
    print(table(measured))


def plan(name: str, gpus: int, options: Any) -> Job:
    """Return the job of a row, with its paths and sizes."""
    row = ROWS[name]
    shape, stored = row.model.split("-")
    shape, shorter = ("tiny", TINY) if options.tiny else (shape, 1)
    depth = {"70b": 80, "tiny": 2}.get(shape, 32)
    layers = min(n for n in (row.layers, options.layers, depth) if n)
    length = row.length // shorter
    rows = row.batch * (1 if row.shared else gpus)
    data = options.work / f"text-{(options.steps + 2) * rows * length}.jsonl"
    model = options.work / f"{shape}-{stored}-{layers}"
    return Job(name, gpus, model, data, length, row, options.steps, options.out)


def command(job: Job, recipe: Path, *, tiny: bool = False) -> list[str]:
    """Return the command that launches a row. One process runs without a launcher."""
    given = [str(recipe), f"train.effective_batch_size={job.batch}", *job.row.changes]
    if job.row.recipe:
        folder = job.out / "runs" / f"{job.name}-x{job.gpus}"
        given = [f"recipes/{job.row.recipe}", *of_recipe(job, folder), *job.row.changes]
    if job.gpus == 1:
        given += ["model.quantization=fp8"] if job.row.config == "8xh100_fp8" and not tiny else []
        return [sys.executable, "-m", "finetune", "train", *given]
    config = ROOT / "accelerate_configs" / f"{'cpu_2' if tiny else job.row.config}.yaml"
    if job.row.shared and not tiny:  # the config sets how many processes share a sequence
        text = config.read_text().replace("cp_size: 4", f"cp_size: {job.gpus}")
        config = recipe.with_name(f"{job.row.config}-{job.gpus}.yaml")
        config.write_text(text)
    line = [sys.executable, "-m", "finetune.launch", "--config_file", str(config)]
    return [*line, "--num_processes", str(job.gpus), "-m", "finetune", "train", *given]


def launch(job: Job, *, tiny: bool = False) -> dict[str, Any]:
    """Run a row, and read its results from the run folder."""
    key = f"{job.name}-x{job.gpus}"
    folder, recipe = job.out / "runs" / key, job.out / f"{key}.yaml"
    sizes = {"length": job.length, "batch": job.row.batch, "steps": job.steps}
    recipe.write_text(RECIPE.format(model=job.model, data=job.data, folder=folder, **sizes))
    shutil.rmtree(folder, ignore_errors=True)
    log, started = job.out / f"{key}.log", time.perf_counter()
    # A row uses the first visible GPUs, so several rows can run in parallel.
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [*map(str, range(job.gpus))]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    given = {"CUDA_VISIBLE_DEVICES": ",".join(devices[: job.gpus]), "PYTHONPATH": paths}
    environment = {**os.environ, **given, **dict(job.row.variables)}
    with log.open("w") as file:
        line = command(job, recipe.resolve(), tiny=tiny)
        code = ended(line, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    lines = folder / "metrics.jsonl"
    steps = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    steps = [line for line in steps if "loss" in line]
    made = {"process_seconds": time.perf_counter() - started, "gpus": job.gpus}
    failed = failure(code, log) if code else {}
    for big in ("adapter", "model", "checkpoints"):
        shutil.rmtree(folder / big, ignore_errors=True)
    if len(steps) < job.steps:
        return {**made, **failed}
    late = (
        {"failed_after_training": failed["reason"]} if failed else {}
    )  # the figures of the steps are valid anyway
    return {**made, **late, **result(job, steps, folder)}


def ended(line: list[str], **given: Any) -> int:
    """Run a command and return its exit code. If this process is stopped, stop the command too."""
    process = subprocess.Popen(line, start_new_session=True, **given)
    try:
        return process.wait()
    except BaseException:  # also a signal, because ranks that continue would use the GPUs
        os.killpg(process.pid, signal.SIGKILL)
        raise


def result(job: Job, steps: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the entry of a row in multi_gpu.json."""
    run_checks = {r["option"]: r["actual"] for r in json.loads((folder / "checks.json").read_text())}
    environment = json.loads((folder / "environment.json").read_text())
    seconds = statistics.median(step["step_seconds"] for step in steps[WARM:])
    real = (steps[-1]["tokens"] - steps[WARM - 1]["tokens"]) / (len(steps) - WARM)
    return {
        "tokens_per_second": real / seconds,
        "tokens_per_step": job.batch * job.length,
        "step_seconds": seconds,
        "first_step_seconds": steps[0]["step_seconds"],
        "peak_gib": steps[-1]["gpu_memory_gib"] or 0.0,
        "first_step_peak_gib": steps[0]["gpu_memory_gib"] or 0.0,
        "activation_checkpointing": run_checks.get("speed.activation_checkpointing", "none"),
        "corrected": {
            name: value for name, value in run_checks.items() if "auto after out of memory" in name
        },
        "loss": steps[-1]["loss"],
        "config": job.row.config,
        "exchanged": run_checks.get("gradients all-reduced", run_checks.get("sharded by FSDP", "")),
        "attention": run_checks.get("model.attention", ""),
        "layers": int(job.model.name.rpartition("-")[2]),
        "gpu": environment["hardware"]["name"],
        "torch": environment["packages"]["torch"],
        "date": time.strftime("%Y-%m-%d"),
    }


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return the measured rows as a Markdown table."""
    lines = [
        "| | config | tokens/s | a GPU | x of one | step, s | peak GiB | last loss | GPU, torch, date |",
        "|---|" + "---|" * 8,
    ]
    for name, row in measured.items():
        if "tokens_per_second" not in row:
            lines.append(f"| {name} | | failed: {row['reason'].replace('|', '/')} |" + " |" * 6)
            continue
        rate, alone = row["tokens_per_second"], measured.get(f"{name.rpartition(' x')[0]} x1", {})
        beside = alone.get("date") == row["date"]  # machines and kernels of another day may differ
        times = f"{rate / alone['tokens_per_second']:.2f}" if beside else ""
        where = f"{row['gpu']}, {row['torch'].partition('+')[0]}, {row['date']}"
        lines.append(
            f"| {name} | {row['config']} | {rate:,.0f} | {rate / row['gpus']:,.0f} | {times} "
            f"| {row['step_seconds']:.3f} | {row['peak_gib']:.1f} | {row['loss']:.3f} | {where} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
