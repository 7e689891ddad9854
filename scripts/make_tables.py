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


if __name__ == "__main__":
    main()
