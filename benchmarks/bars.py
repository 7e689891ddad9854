"""Compare the speed on one H200 with targets that were set before the work. Prints a table from gpu.json.

    python benchmarks/bars.py

The targets come from the measured speed of GEMMs and memory, and from figures of other projects on the same
kind of GPU. Unsloth, MLPerf and Liger published their figures, or they were measured elsewhere. The rows
`trl*` of gpu.json were measured with gpu.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).with_name("gpu.json")


class Bar(NamedTuple):
    """The target of a row."""

    row: str
    said: str
    rate: float = 0.0
    """The least tokens/s."""
    of: str = ""
    """The row that `rate` is a share of."""
    peak: float = 0.0
    """The largest peak memory in GiB."""
    others: str = ""
    limit: str = ""


BARS = [
    Bar("lora-bf16-fa3", "LoRA, bf16", 17_500, peak=76, others="15,228 (Unsloth)", limit="19,900"),
    Bar("lora-fp8-fa3", "LoRA, fp8", 26_000, peak=70, others="17,769 (Unsloth, fp8 forward)", limit="31,500"),
    Bar("dora-bf16", "DoRA, bf16: 1.08 times LoRA's time", 1 / 1.08, "lora-bf16", others="13,597 (Unsloth)"),
    Bar("dora-fp8", "DoRA, fp8: the same", 1 / 1.08, "lora-fp8"),
    Bar("adalora-bf16", "AdaLoRA, bf16: 0.95 of LoRA", 0.95, "lora-bf16"),
    Bar("adalora-fp8", "AdaLoRA, fp8: the same", 0.95, "lora-fp8"),
    Bar("ia3-bf16", "IA3, bf16: the same", 0.95, "lora-bf16"),
    Bar("ia3-fp8", "IA3, fp8: the same", 0.95, "lora-fp8"),
    Bar("qlora", "qLoRA, NF4", 16_000, others="15,131 (Unsloth)", limit="about 19,000"),
    Bar("lora-bf16-mlp-small", "small memory, bf16", 13_500, "", 20, "10,720 at 19.7 (Unsloth)", "15,300"),
    Bar("lora-fp8-mlp-small", "small memory, fp8", 18_000, "", 14, "13,449 at 13.2 (Unsloth)", "21,400"),
    Bar("lora-bf16-packed", "packed documents, bf16: 0.95 of full sequences", 0.95, "lora-bf16"),
    Bar("lora-fp8-packed", "packed documents, fp8: the same", 0.95, "lora-fp8"),
    Bar(
        "70b-fp8-auto",
        "70B, sequences of 8,192",
        2_900,
        others="2,649 (MLPerf, 8 x H200)",
        limit="about 3,800",
    ),
    Bar("cap-24", "8B in 24 GiB", 1, peak=24, others="Unsloth claims it"),
    Bar("cap-48", "70B qLoRA in 48 GiB", 1, peak=48, others="Unsloth claims it"),
    Bar("full-bf16", "full fine-tuning, 8 layers: TRL + Liger in fp32", 1, "trl-full-fp32+liger"),
    Bar("full-bf16", "the same: TRL + Liger in bf16", 1, "trl-full+liger"),
]  # fmt: skip


def main() -> None:
    print(table(json.loads(RESULTS.read_text())), end="")


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Return each target and the measured value as a Markdown table."""
    lines = ["| | row | bar | measured | reached | others | limit | date |", "|---|" + "---|" * 7]
    for bar in BARS:
        row = measured[bar.row]
        least = bar.rate * (measured[bar.of]["tokens_per_second"] if bar.of else 1)
        rate, peak = row["tokens_per_second"], row["peak_gib"]
        asked = [f"{least:,.0f} tokens/s"] if least > 1 else ["trains"]
        asked += [f"{bar.peak:.0f} GiB"] if bar.peak else []
        got = f"{rate:,.0f}" + (f", {peak:.1f} GiB" if bar.peak else "")
        within = not bar.peak or peak <= bar.peak
        reached = (
            "yes" if rate >= least and within else f"{rate / least:.1%}" + ("" if within else ", too large")
        )
        cells = [bar.said, bar.row, ", ".join(asked), got, reached, bar.others, bar.limit, row["date"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
