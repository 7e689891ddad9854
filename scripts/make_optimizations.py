"""Write docs/reference/optimizations.md from recipes/ablation.yaml and measurements. A test keeps it current."""

# ruff: noqa: E501 (lines of Markdown are not wrapped)
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.ablation import optimizations
from finetune.experiments.runner import measured_run

if TYPE_CHECKING:
    from finetune.experiments.ablation.optimizations import Rung

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "optimizations.md"
HEAD = """# Optimizations

<!-- made by scripts/make_optimizations.py -->

```text
finetune ablate recipes/quickstart.yaml
```

`finetune ablate` measures each optimization of [recipes/ablation.yaml](../../recipes/ablation.yaml) on your machine. It then writes
a recipe with the optimizations that helped ([guide](../guides/ablate.md)).

| column | measurement |
|---|---|
| CPU | `finetune ablate recipes/quickstart.yaml`, {cpu}, {cpu_steps} steps per run. The noise of one run was {noise} ([table](../../benchmarks/ladder.md)). |
| GPU | {layers} layers of Llama 3.1 8B, {gpu}, {gpu_steps} steps per run ([table](../../benchmarks/ladder_gpu.md)). |
| whole model | Llama 3.1 8B with LoRA, one {device}: two rows of [gpu.json](../../benchmarks/gpu.json) that differ only in this option. |

The columns "alone" divide {unit} (CPU) or tokens/s (GPU) with this optimization by the same without it. An optimization that
builds on others is compared with them. The part after ± is the noise. On the GPU, the models have random weights.

| optimization | effect | CPU: alone | verdict | GPU: alone | verdict | whole model | cost | off |
|---|---|---|---|---|---|---|---|---|
"""
NAMED = {
    "elsewhere": """
## Measured elsewhere

These optimizations have a switch, but `finetune ablate` does not measure them:

""",
    "no-op": """
## No-ops

These names are often recommended. finetune has nothing to switch:

""",
}


def page() -> str:
    """The content of docs/reference/optimizations.md."""
    rungs = optimizations.read(ROOT / "recipes" / "ablation.yaml").rungs
    cpu = json.loads((ROOT / "benchmarks" / "ladder.json").read_text(encoding="utf-8"))
    gpu = json.loads((ROOT / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    climbed = json.loads((ROOT / "benchmarks" / "ladder_gpu.json").read_text(encoding="utf-8"))
    on_each = [{row["name"]: row for row in found["rungs"]} for found in (cpu, climbed)]
    said = [f"{one['machine']['hardware']}, {one['date']}" for one in (cpu, climbed)]
    unit, noise = measured_run.UNITS[cpu["rate"]], f"{cpu['noise'][cpu['rate']]:.1%}"
    device, layers = gpu["lora-bf16"]["gpu"], Path(climbed["recipe"]).stem.split("_")[1]
    cpu_steps, gpu_steps = (one["measure"]["steps"] for one in (cpu, climbed))
    text = HEAD.format(
        cpu=said[0],
        gpu=said[1],
        unit=unit,
        noise=noise,
        device=device,
        layers=layers,
        cpu_steps=cpu_steps,
        gpu_steps=gpu_steps,
    )
    for rung in rungs:
        if not rung.unmeasured[0]:
            newer = {"status": "not measured", "why": "newer than these figures"}
            found = [cell for rows in on_each for cell in alone(rows.get(rung.name, newer), rung)]
            cells = [rung.name, rung.what, *found, whole(rung, gpu), rung.cost or "-"]
            text += f"| {' | '.join([*cells, f'`{rung.off}`'])} |\n"
    for status, head in NAMED.items():
        text += head
        for rung in [rung for rung in rungs if rung.unmeasured[0] == status]:
            reason = rung.unmeasured[1]
            text += f"- **{rung.name}**: {rung.what} {reason[:1].upper()}{reason[1:]}.\n"
    return text


def alone(row: dict[str, Any], rung: Rung) -> list[str]:
    """Return the cells of the effect alone and of the verdict."""
    found, verdict = row.get("alone", {}), f"{row['status']}: {row['why']}".replace("elsewhere: ", "")
    if "speedup" not in found:
        return ["not measured", verdict]
    if (then := row.get("on", rung.on)) != rung.on:
        stood = " and ".join(then) or "the baseline"
        verdict += f"; measured on {stood}, it now builds on {' and '.join(rung.on)}"
    memory = f", {found['memory_ratio'] - 1:+.0%} memory" if abs(found["memory_ratio"] - 1) > 0.02 else ""
    return [f"{found['speedup']:.2f} ±{found['noise']:.2f}{memory}", verdict]


def whole(rung: Rung, gpu: dict[str, Any]) -> str:
    """Return the effect on the whole model: the speed-up and both peaks of memory."""
    if rung.gpu is None:
        return "-"
    on, off = gpu[rung.gpu.on], gpu[rung.gpu.off]
    speed = off["step_seconds"] / on["step_seconds"]
    return f"{speed:.2f} times as fast, {off['peak_gib']:.1f} to {on['peak_gib']:.1f} GiB"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
