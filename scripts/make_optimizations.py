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
    from finetune.experiments.ablation.optimizations import Optimization

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
| CPU | `finetune ablate recipes/quickstart.yaml`, {cpu}, {cpu_steps} steps per run. The noise of one run was {noise} ([table](../../benchmarks/ablation.md)). |
| GPU | {layers} layers of Llama 3.1 8B, {gpu}, {gpu_steps} steps per run ([table](../../benchmarks/ablation_gpu.md)). |
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
    listed = optimizations.read(ROOT / "recipes" / "ablation.yaml").optimizations
    cpu = json.loads((ROOT / "benchmarks" / "ablation.json").read_text(encoding="utf-8"))
    gpu = json.loads((ROOT / "benchmarks" / "gpu.json").read_text(encoding="utf-8"))
    climbed = json.loads((ROOT / "benchmarks" / "ablation_gpu.json").read_text(encoding="utf-8"))
    on_each = [{row["name"]: row for row in found["optimizations"]} for found in (cpu, climbed)]
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
    for optimization in listed:
        if not optimization.unmeasured[0]:
            newer = {"status": "not measured", "why": "newer than these figures"}
            found = [
                cell for rows in on_each for cell in alone(rows.get(optimization.name, newer), optimization)
            ]
            cells = [
                optimization.name,
                optimization.what,
                *found,
                whole(optimization, gpu),
                optimization.cost or "-",
            ]
            text += f"| {' | '.join([*cells, f'`{optimization.off}`'])} |\n"
    for status, head in NAMED.items():
        text += head
        for optimization in [one for one in listed if one.unmeasured[0] == status]:
            reason = optimization.unmeasured[1]
            text += f"- **{optimization.name}**: {optimization.what} {reason[:1].upper()}{reason[1:]}.\n"
    return text


def alone(row: dict[str, Any], optimization: Optimization) -> list[str]:
    """Return the cells of the effect alone and of the verdict."""
    found, verdict = row.get("alone", {}), f"{row['status']}: {row['why']}".replace("elsewhere: ", "")
    if "speedup" not in found:
        return ["not measured", verdict]
    if (then := row.get("on", optimization.on)) != optimization.on:
        stood = " and ".join(then) or "the baseline"
        verdict += f"; measured on {stood}, it now builds on {' and '.join(optimization.on)}"
    memory = f", {found['memory_ratio'] - 1:+.0%} memory" if abs(found["memory_ratio"] - 1) > 0.02 else ""
    return [f"{found['speedup']:.2f} ±{found['noise']:.2f}{memory}", verdict]


def whole(optimization: Optimization, gpu: dict[str, Any]) -> str:
    """Return the effect on the whole model: the speed-up and both peaks of memory."""
    if optimization.gpu is None:
        return "-"
    on, off = gpu[optimization.gpu.on], gpu[optimization.gpu.off]
    speed = off["step_seconds"] / on["step_seconds"]
    return f"{speed:.2f} times as fast, {off['peak_gib']:.1f} to {on['peak_gib']:.1f} GiB"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
