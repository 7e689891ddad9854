"""Compare a recipe of recipes/gpus with the frozen baseline on 1, 2 and 4 GPUs.

    python benchmarks/ab.py --gpus 1,2 [--work /dev/shm/finetune]

The results are in ab.json. Each comparison calls scripts/validate_optimizations.py with both recipes. It
overrides only the model and the data: the Llama 3.1 8B architecture with random weights, and documents with
log-normal lengths of 400 tokens on average (gpu_inputs.py). Both sides train about 64,000 tokens per step on
any number of GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BASELINE, OPTIMIZED = "recipes/baselines/llama3_8b.yaml", "recipes/gpus/80gb_fastest.yaml"
LIMITS = ["--min-speedup", "3", "--max-loss-delta", "0.5%"]
DOCUMENTS = 160  # per step of the baseline
TINY = ["data.max_length=64", "train.per_device_train_batch_size=2", "train.effective_batch_size=4"]
TINY += ["speed.compile=false"]


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--gpus", default="1,2,4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("/tmp/finetune-gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/ab"))
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = options.out / "ab.json"
    measured = json.loads(found.read_text()) if found.exists() else {}
    given = inputs(options)
    for gpus in options.gpus.split(","):
        measured[f"x{gpus}"] = compare(int(gpus), given, options)
        found.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(measured))


def inputs(options: Any) -> list[str]:
    """Make the model and the data once, and return them as overrides of both recipes."""
    from gpu_inputs import MEAN, make_data, make_model

    options.work.mkdir(parents=True, exist_ok=True)
    shape, layers = ("tiny", 2) if options.tiny else ("8b", options.layers)
    model = make_model(options.work / f"{shape}-bf16-{layers}", shape, "bf16", layers)
    tokens = MEAN * (4 if options.tiny else DOCUMENTS) * (options.steps + 2)
    data = make_data(options.work / f"documents-{tokens}.jsonl", tokens, documents=True)
    given = [f"model.name={model}", f"data.name={data}", "data.format=text", "data.train_on=all"]
    return [*given, "data.too_long=split", *(TINY if options.tiny else [])]


def compare(gpus: int, given: list[str], options: Any) -> dict[str, Any]:
    """Call the script, and return its measurements, exit code and command."""
    place = (options.out / f"x{gpus}").resolve()
    launch = ["--accelerate", "cpu_2" if options.tiny else f"ddp_{gpus}"] if gpus > 1 else []
    line = ["scripts/validate_optimizations.py", "--baseline", BASELINE, "--optimized", OPTIMIZED, *LIMITS]
    length = ["--steps", options.steps, "--warm-up", options.warm_up, "--repeats", options.repeats]
    line += [*map(str, length), *launch, "--output", str(place), *given]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": paths}
    names = (Path(BASELINE).stem, Path(OPTIMIZED).stem)
    left = place / "ab" / "-against-".join(names) / names[1] / "ablation.json"
    left.unlink(missing_ok=True)  # from an earlier call
    ended = subprocess.run([sys.executable, *line], cwd=ROOT, env=environment, check=False)
    if not left.exists():
        return {"code": ended.returncode, "failed": "a run failed: its log says why"}
    found = json.loads(left.read_text())
    (optimized,) = found["optimizations"]
    if "alone" not in optimized:
        return {"code": ended.returncode, "failed": optimized["why"]}
    machine = {key: found["machine"][key] for key in ("hardware", "processes", "torch")}
    measured = {"sides": [found["baseline"], optimized["alone"]], "machine": machine, "date": found["date"]}
    return {"code": ended.returncode, "steps": options.steps - options.warm_up, **measured}


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return both sides on each number of GPUs as a Markdown table."""
    lines = [
        "| | tokens/s, baseline | optimized | times | peak GiB of a GPU | validation loss | exit code "
        "| machine, torch, date |",
        "|---|" + "---|" * 7,
    ]
    for name, one in measured.items():
        if "failed" in one:
            lines.append(f"| {name} | {one['failed']} |" + " |" * 6)
            continue
        before, after = one["sides"]
        rates = [side["tokens_per_second"] for side in one["sides"]]
        losses = " -> ".join(f"{side['held_out']:.4f}" for side in one["sides"])
        memory = " -> ".join(f"{side['memory_gib']:.1f}" for side in (before, after))
        where = f"{one['machine']['hardware']}, {one['machine']['torch'].partition('+')[0]}, {one['date']}"
        lines.append(
            f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[1] / rates[0]:.2f} | {memory} | {losses} "
            f"| {one['code']} | {where} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
