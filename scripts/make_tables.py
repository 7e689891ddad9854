"""Write every table of what was measured, from benchmarks/*.json.

    python scripts/make_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; ladder.md and reliability.md are
made whole. tests/integration/test_readme.py compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from finetune.experiments.ablation import ablation_report

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = ("README.md", "benchmarks/README.md", "recipes/README.md", "docs/sweep.md", "docs/verdicts.md")
BLOCK = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
TABLES = {  # by name: what makes it in benchmarks/, and of which JSON there, once that is measured
    "ab": ("ab:table", "ab"),
    "adapters": ("adapter_tables:guide_table", "adapters"),
    "adapters_quality": ("adapter_tables:quality_table", "adapters"),
    "adapters_shape": ("adapter_tables:shape_table", "adapters"),
    "attention": ("attention:table", "attention"),
    "bars": ("bars:table", "gpu"),
    "data": ("data:table", "data"),
    "evaluation": ("evaluation:real_table", "evaluation"),
    "evaluation_speed": ("evaluation:speed_table", "evaluation"),
    "gpu": ("gpu:table", "gpu"),
    "loss_parity": ("loss_parity:table", "loss_parity"),
    "multi_gpu": ("multi_gpu:table", "multi_gpu"),
    "plan": ("plan:table", "plan"),
    "products": ("products:table", "products"),
    "quickstart": ("quickstart:table", "quickstart"),
    "reliability": ("reliability:page", "reliability"),
    "tuning": ("tuning:table", "tuning"),
    "verdicts_answers": ("verdicts:answers_table", "verdicts"),
    "verdicts_false": ("verdicts:false_table", "verdicts"),
    "verdicts_found": ("verdicts:found_table", "verdicts"),
    "verdicts_losses": ("verdicts:losses_table", "verdicts"),
    "verdicts_trials": ("verdicts:trials_table", "verdicts"),
    "verdicts_winners": ("verdicts:winners_table", "verdicts"),
}
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
    for page, text in pages().items():
        (ROOT / page).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Each page as it is to be, with its tables as they are measured now."""
    measured = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in BENCHMARKS.glob("*.json")}
    made = tables(measured)
    found = {page: written((ROOT / page).read_text(encoding="utf-8"), made) for page in PAGES}
    for name in [name for name in measured if name.startswith("ladder")]:
        text = ablation_report.markdown(measured[name])
        found[f"benchmarks/{name}.md"] = text.replace("(ladder.svg)", f"({name}.svg)")
    return found | {"benchmarks/reliability.md": made["reliability"]}


def written(text: str, made: dict[str, str]) -> str:
    """A page with these tables between its markers."""
    return BLOCK.sub(lambda f: f"<!-- table: {f[1]} -->\n{made[f[1]].strip()}\n<!-- end of table -->", text)


def tables(measured: dict[str, Any]) -> dict[str, str]:
    """Each table by its name; those of a benchmark are its own."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        made = {name: resolve_name(by)(measured[of]) for name, (by, of) in TABLES.items() if of in measured}
    finally:
        sys.path.pop(0)
    return made | {"speed": speed(measured["gpu"]), "ladder": ladder(measured["ladder"])}


def speed(measured: dict[str, dict[str, float]]) -> str:
    """An 8B Llama's shape on one GPU."""
    lines = ["| 8B Llama's shape, one H200, 16,384 tokens a step | tokens/s | peak GiB |", "|---|---|---|"]
    for name, shown in SPEED.items():
        row = measured[name]
        lines.append(f"| {shown} | {row['tokens_per_second']:,.0f} | {row['peak_gib']:.1f} |")
    return "\n".join(lines) + "\n"


def ladder(found: dict[str, Any]) -> str:
    """Some optimizations of the quickstart's ablation, and the speedup of the whole stack."""
    unit = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens per CPU second"}[found["rate"]]
    lines = ["optimization     alone        stacked      held-out  status"]
    for row in [row for row in found["rungs"] if row["name"] in RUNGS]:
        cells = [
            f"{row[how]['speedup']:.2f} ±{row[how]['noise']:.2f}" if row.get(how) else "-"
            for how in ("alone", "stacked")
        ]
        scored = row.get("stacked") or row.get("alone") or {}
        held_out = f"{scored['held_out']:.4f}" if scored.get("held_out") else "-"
        cells += [held_out.ljust(9), f"{row['status']}: {row['why']}"]
        lines.append(f"{row['name']:<17}" + " ".join([f"{cells[0]:<12}", f"{cells[1]:<12}", *cells[2:]]))
    end = f"The numbers are {unit} relative to the baseline, ± the part that noise explains. "
    if found["as_is"]:
        own = found["as_is"][found["rate"]] / found["baseline"][found["rate"]]
        end += f"Your recipe trains {own:.2f} times as fast as the baseline. "
    end += f"With the kept optimizations it trains {found['speedup']:.2f} times as fast. "
    end += f"The ablation took {found['seconds']:.0f} s."
    return "\n".join(["```", *lines, "```", "", end]) + "\n"


if __name__ == "__main__":
    main()
