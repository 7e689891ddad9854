"""Write README.md's tables of what was measured, each between its markers, from benchmarks/*.json.

    python scripts/make_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; tests/test_readme.py compares.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "README.md"
BLOCK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
SPEED = {  # rows of gpu.json
    "lora-fp8": "LoRA, fp8 base",
    "lora-bf16": "LoRA, bf16 base",
    "dora-fp8": "DoRA, fp8 base",
    "qlora": "qLoRA, NF4 base",
    "lora-fp8-mlp-small": "LoRA, fp8 base, `offload: activations`",
    "lora-bf16-mlp-small": "LoRA, bf16 base, `offload: activations`",
    "trl+liger": "TRL with Liger's kernels: LoRA, bf16",
    "trl-dora+liger": "the same: DoRA, bf16, everything recomputed",
    "trl-qlora+liger": "the same: qLoRA, NF4 base",
}


RUNGS = (
    "bf16", "sdpa", "packing", "length_grouping", "chunked_loss", "no_recompute", "adamw_8bit", "tf32",
    "set_to_none",
)  # fmt: skip


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def written(text: str) -> str:
    """The page with its tables as they are measured now."""
    made = tables()
    return BLOCK.sub(lambda f: f"<!-- table: {f[1]} -->\n{made[f[1]].strip()}\n<!-- end of table -->", text)


def tables() -> dict[str, str]:
    """Each table by its name; those of a benchmark are its own."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        data, evaluation, quickstart = map(import_module, ("data", "evaluation", "quickstart"))
    finally:
        sys.path.pop(0)
    return {
        "speed": speed(json.loads((ROOT / "benchmarks" / "gpu.json").read_text())),
        "quickstart": quickstart.table(json.loads(quickstart.RESULTS.read_text())),
        "ladder": ladder(json.loads((ROOT / "benchmarks" / "ladder.json").read_text())),
        "data": data.table(json.loads(data.RESULTS.read_text())),
        "evaluation": evaluation.real_table(json.loads(evaluation.RESULTS.read_text())),
    }


def speed(measured: dict[str, dict[str, float]]) -> str:
    """An 8B Llama's shape on one GPU."""
    lines = ["| 8B Llama's shape, one H200, 16,384 tokens a step | tokens/s | peak GiB |", "|---|---|---|"]
    for name, shown in SPEED.items():
        row = measured[name]
        lines.append(f"| {shown} | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} |")
    return "\n".join(lines) + "\n"


def ladder(found: dict[str, Any]) -> str:
    """Some rungs of the quickstart's ladder, and what it came to."""
    unit = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens a CPU second"}[found["rate"]]
    lines = ["rung             alone        stacked      held-out  what became of it"]
    for row in [row for row in found["rungs"] if row["name"] in RUNGS]:
        cells = [
            f"{row[how]['speedup']:.2f} ±{row[how]['noise']:.2f}" if row.get(how) else "-"
            for how in ("alone", "stacked")
        ]
        scored = row.get("stacked") or row.get("alone") or {}
        held_out = f"{scored['held_out']:.4f}" if scored.get("held_out") else "-"
        cells += [held_out.ljust(9), f"{row['status']}: {row['why']}"]
        lines.append(f"{row['name']:<17}" + " ".join([f"{cells[0]:<12}", f"{cells[1]:<12}", *cells[2:]]))
    end = f"In times the baseline's {unit}, ± what noise explains; with what was kept it trains "
    end += f"{found['speedup']:.2f} times as fast as a plain loop. The ladder took {found['seconds']:.0f} s."
    return "\n".join(["```", *lines, "```", "", end]) + "\n"


if __name__ == "__main__":
    main()
