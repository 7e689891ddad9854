"""Write every table of the documentation from the measurements in benchmarks/*.json.

    python scripts/make_tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; ablation.md and reliability.md are
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
from finetune.recipe.build import json_schema

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGES = (
    "README.md",
    "docs/reference/benchmarks.md",
    "docs/guides/choose_method.md",
    "docs/guides/evaluate.md",
    "docs/guides/ablate.md",
    "docs/guides/dataset_formats.md",
    "docs/guides/sweep.md",
    "docs/explanation/verdicts.md",
    "docs/explanation/performance.md",
    "docs/tutorials/first_run.md",
)
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
    "experts": ("experts:table", "experts"),
    "experts_short": ("experts:short_table", "experts"),
    "families": ("families:table", "families"),
    "gpu": ("gpu:table", "gpu"),
    "loss_parity": ("loss_parity:table", "loss_parity"),
    "multi_gpu": ("multi_gpu:table", "multi_gpu"),
    "peers": ("gpu:table", "peers"),
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
SPEED = (  # method; rows of peers.json: finetune's, TRL's with Liger kernels, and Unsloth's
    ("LoRA, bf16 base model", "lora-bf16", "trl+liger", "unsloth"),
    ("LoRA, fp8 base model and GEMMs", "lora-fp8", "", ""),
    ("QLoRA, NF4 base model", "qlora", "trl-qlora+liger", "unsloth-qlora"),
)
OPTIMIZATIONS = (
    "bf16", "sdpa", "packing", "length_grouping", "chunked_loss", "no_recompute", "adamw_8bit", "tf32",
    "set_to_none",
)  # fmt: skip


def main() -> None:
    for page, text in pages().items():
        (ROOT / page).write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return each page with its tables from the current measurements."""
    measured = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in BENCHMARKS.glob("*.json")}
    made = tables(measured)
    found = {page: written((ROOT / page).read_text(encoding="utf-8"), made) for page in PAGES}
    for name in [name for name in measured if name.startswith("ablation")]:
        text = ablation_report.markdown(measured[name])
        found[f"benchmarks/{name}.md"] = text.replace("(ablation.svg)", f"({name}.svg)")
    return found | {"benchmarks/reliability.md": made["reliability"]}


def written(text: str, made: dict[str, str]) -> str:
    """Return a page with these tables between its markers."""
    return BLOCK.sub(lambda f: f"<!-- table: {f[1]} -->\n{made[f[1]].strip()}\n<!-- end of table -->", text)


def tables(measured: dict[str, Any]) -> dict[str, str]:
    """Return each table by its name. A benchmark makes its own table."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        made = {name: resolve_name(by)(measured[of]) for name, (by, of) in TABLES.items() if of in measured}
        made["highlights"] = highlights(measured)
        made["plan_verdict"] = resolve_name("plan:verdict")(measured["plan"]) + "\n"
    finally:
        sys.path.pop(0)
    own = {"speed": speed(measured["peers"]), "dora": dora(measured["gpu"])}
    return (
        made | own | {"scaling": scaling(measured["multi_gpu"]), "ablation": ablation(measured["ablation"])}
    )


def speed(measured: dict[str, dict[str, Any]]) -> str:
    """Compare finetune with TRL and Unsloth: Llama 3.1 8B, all rows from one call on one GPU."""
    first = measured["lora-bf16"]
    head = f"Llama 3.1 8B architecture, {first['gpu']}, 4 x 4,096 tokens per step"
    lines = [f"| {head} | finetune | TRL + Liger kernels | Unsloth 2026.10.9 |", "|---|---|---|---|"]
    for method, *names in SPEED:
        cells = [_rate_and_peak(measured[name]) if name else "not measured" for name in names]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Tokens/s and peak GPU memory, one run per cell, {first['date']}."]) + "\n"


def dora(measured: dict[str, dict[str, Any]]) -> str:
    """Compare a step of DoRA with a step of LoRA and with TRL's DoRA."""
    lines = ["| base model | DoRA's step, times LoRA's | DoRA's tokens/s, times TRL's |", "|---|---|---|"]
    for base in ("bf16", "fp8"):
        own, other = measured[f"dora-{base}"], measured[f"lora-{base}"]
        slower = own["step_seconds"] / other["step_seconds"]
        faster = own["tokens_per_second"] / measured["trl-dora+liger"]["tokens_per_second"]
        lines.append(f"| {base} | {slower:.2f} | {faster:.1f} |")
    return "\n".join(lines) + "\n"


SCALING = {
    "lora-bf16 x4": ("Llama 3.1 8B, LoRA, bf16", "lora-bf16 x1"),
    "lora-fp8 x4": ("Llama 3.1 8B, LoRA, fp8", "lora-fp8 x1"),
    "70b-fp8 x4": ("Llama 70B, LoRA on attention, fp8, sequences of 8,192", ""),
    "128k-cp x4": ("Llama 3.1 8B, bf16, sequences of 131,072, context parallelism", ""),
}


def scaling(measured: dict[str, dict[str, Any]]) -> str:
    """Return tokens/s on four GPUs and the speedup over one GPU."""
    gpu = measured["lora-bf16 x4"]["gpu"]
    lines = [
        f"| 4 x {gpu}, random weights | tokens/s | times one GPU | peak GiB per GPU |",
        "|---|---|---|---|",
    ]
    for name, (shown, one) in SCALING.items():
        row = measured[name]
        rate = row["tokens_per_second"]
        times = f"{rate / measured[one]['tokens_per_second']:.2f}" if one else "not measured"
        lines.append(f"| {shown} | {rate:,.0f} | {times} | {row['peak_gib']:.1f} |")
    return "\n".join(lines) + "\n"


def _rate_and_peak(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:,.0f} tokens/s, {row['peak_gib']:.1f} GiB"


def highlights(measured: dict[str, Any]) -> str:
    """Return six facts with one number each, for the README."""
    gpu, matrix = measured["gpu"], measured["reliability"]["resume matrix"]["cells"]
    plans, verdicts = resolve_name("plan:errors")(measured["plan"], "gib"), measured["verdicts"]
    equal, resumed = sum(cell["equal"] for cell in matrix.values()), len(matrix) * 11
    false = max(rate for sizes in verdicts["false"].values() for rates in sizes.values() for rate in rates)
    missed = sum("ran_out" in row for row in measured["plan"].values())
    near = f"{sum(error <= 0.10 for error in plans)} of {len(plans) + missed}"
    types = len(json_schema()["properties"]["adapter"]["discriminator"]["mapping"])
    offloaded = (
        "GPU memory of the same training with offloaded activations (without: {:.1f} GiB), {:,.0f} tokens/s"
    )
    fast, small = measured["peers"]["lora-fp8"], gpu["lora-fp8-mlp-small"]
    rows = [
        (
            "Fast",
            f"{fast['tokens_per_second']:,.0f} tokens/s",
            f"LoRA on an 8B fp8 base model, {fast['gpu']}",
        ),
        (
            "Small",
            f"{small['peak_gib']:.1f} GiB",
            offloaded.format(fast["peak_gib"], small["tokens_per_second"]),
        ),
        ("Predicted", near, "measured memory peaks are within 10% of the plan"),
        (
            "Exact",
            f"{equal} of {resumed}",
            "resumed runs equal the uninterrupted run bit for bit, on the CPU",
        ),
        ("Honest", f"at most {false:.1%}", "of simulated evaluations call two equal models different"),
        ("Complete", f"{types}", "values of `adapter.type`: adapter types and full fine-tuning"),
    ]
    return "\n".join(["| | | |", "|---|---|---|", *(f"| **{a}** | {b} | {c} |" for a, b, c in rows)]) + "\n"


def ablation(found: dict[str, Any]) -> str:
    """Return some optimizations of the quickstart's ablation, and the speedup of the whole stack."""
    unit = {"tokens_per_second": "tokens/s", "tokens_per_cpu_second": "tokens per CPU second"}[found["rate"]]
    lines = ["optimization     alone        stacked      validation loss  status"]
    for row in [row for row in found["optimizations"] if row["name"] in OPTIMIZATIONS]:
        cells = [
            f"{row[how]['speedup']:.2f} ±{row[how]['noise']:.2f}" if row.get(how) else "-"
            for how in ("alone", "stacked")
        ]
        scored = row.get("stacked") or row.get("alone") or {}
        held_out = f"{scored['held_out']:.4f}" if scored.get("held_out") else "-"
        cells += [held_out.ljust(16), f"{row['status']}: {row['why']}"]
        lines.append(f"{row['name']:<17}" + " ".join([f"{cells[0]:<12}", f"{cells[1]:<12}", *cells[2:]]))
    end = f"Speed is in {unit}. Alone: the baseline is 1. Stacked: the stack before is 1. ± is the noise. "
    if found["as_is"]:
        own = found["as_is"][found["rate"]] / found["baseline"][found["rate"]]
        end += f"The unchanged recipe trains {own:.2f} times as fast as the baseline. "
    end += f"With all kept optimizations it trains {found['speedup']:.2f} times as fast. "
    end += f"The ablation took {found['seconds']:.0f} s."
    return "\n".join(["```text", *lines, "```", "", end]) + "\n"


if __name__ == "__main__":
    main()
