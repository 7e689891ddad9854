"""Train the quickstart with each adapter type, and measure its quality, time and size.

    python benchmarks/quickstart.py                    # all types -> benchmarks/quickstart.json
    python benchmarks/quickstart.py --types lora       # one type; its row is replaced

Each row is one ordinary run: `finetune train recipes/quickstart.yaml adapter.type=...
train.learning_rate=...`.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "quickstart.json"
LEARNING_RATES = {"lora": 4e-3, "qlora": 4e-3, "dora": 4e-3, "adalora": 2e-2, "ia3": 1e-1, "full": 5e-4}


def measure(kind: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one run in a new process, and return its row."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = [f"adapter.type={kind}", f"train.learning_rate={rate}", f"train.seed={seed}"]
        command = [sys.executable, "-m", "finetune", "train", "recipes/quickstart.yaml", *overrides]
        started = time.monotonic()
        subprocess.run([*command, f"train.output_dir={run}", "--quiet"], cwd=ROOT, check=True)
        whole = time.monotonic() - started
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        scores = json.loads((run / "eval.json").read_text())
        environment = json.loads((run / "environment.json").read_text())
        weights = next(run.glob("*/*model.safetensors"))
        return {
            "type": kind,
            "learning_rate": rate,
            "seed": seed,
            "device": environment["hardware"]["name"],
            "processor": platform.processor() or platform.machine(),
            "torch": environment["packages"]["torch"],
            "steps": lines[-1]["step"],
            "training_seconds": sum(line["step_seconds"] for line in lines),
            "whole_command_seconds": whole,
            "tokens_per_second": lines[-1]["tokens"] / sum(line["step_seconds"] for line in lines),
            "base": scores["base"],
            "tuned": scores["tuned"],
            "saved_mb": weights.stat().st_size / 1e6,
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    names = "type, learning rate, device, training, whole command, exact match: base model, fine-tuned model"
    names += ", validation loss, saved"
    lines = [f"| {names.replace(', ', ' | ')} |", "|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        base, tuned = row["base"], row["tuned"]
        loss = f"{base['loss']:.3f} -> {tuned['loss']:.4f}"
        cells = [row["type"], f"{row['learning_rate']:g}", row["device"], f"{row['training_seconds']:.0f} s"]
        cells += [f"{row['whole_command_seconds']:.0f} s", f"{base['exact_match']:.1%}"]
        cells += [f"{tuned['exact_match']:.1%}", loss, f"{row['saved_mb']:.2f} MB"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--types", nargs="*", default=list(LEARNING_RATES))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    for kind in options.types:
        row = measure(kind, LEARNING_RATES[kind], options.seed)
        same = ("type", "device", "seed")
        rows = [r for r in rows if any(r[key] != row[key] for key in same)] + [row]
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
