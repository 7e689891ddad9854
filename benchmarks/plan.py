"""Compare `finetune plan` with the measurements in gpu.json, multi_gpu.json, adapters.json and experts.json.

    python benchmarks/plan.py             # plan each row, write plan.json, print the table

It needs no GPU: each row is planned for the GPU of its measurement. Rows of TRL and Unsloth are excluded.
A failed run has no figures. If a run was planned to fit and ran out of memory, it counts as a miss.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import experts
import gpu
import multi_gpu
from gpu_inputs import SHAPES, document_lengths

from finetune.hardware import gpus
from finetune.planning import dataset_estimate, memory_by_phase, planned_machine, planner, sharding_cost
from finetune.planning.plan import Plan
from finetune.recipe import loader

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent
RESULTS = HERE / "plan.json"
QUICKSTART = HERE.parent / "recipes" / "quickstart.yaml"
# Adapter types that a plan covers. The 1.1B rows are older than fused forwards and used an attention mask.
# AdaLoRA is not among them, because its rank allocation waited for the GPU once per layer at that time
COUNTED = ("lora", "rslora", "dora", "ia3", "full", "qlora", "qdora")
EAGER = (
    "speed.fused=false",
    "speed.compile=false",
    "speed.activation_checkpointing=none",
    "model.attention=sdpa",
)
LARGE = 2048, 8192, 18, 32, 8, 4096  # adapters.py: hidden, intermediate, layers, heads, kv heads, vocabulary
LARGE_LENGTH = 1024
# Rows that ran out of memory, and the micro-batch size with which the run continued. The step time belongs to
# this size. The peak of the allocator belongs to the first attempt, because nothing resets it
RAN_OUT = {"cap-24": 4}
# Choices of `auto` at the time of the measurement that `auto` no longer makes. The first row recomputed the
# MLPs of all 80 layers (57 today). The second row used no activation checkpointing and left no room for NCCL
AS_MEASURED = {
    "70b-fp8 x2": ("speed.activation_checkpointing=mlp",),
    "lora-bf16-fsdp2-compiled x2": ("speed.activation_checkpointing=none",),
}
NEAR = {"seconds": 0.15, "gib": 0.10}  # largest relative error of a plan


def main() -> None:
    rows = compare()
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


# The loss of the rows of gpu.py and multi_gpu.py, which were measured before `chunked_fp8`.
LOSS = "speed.loss=chunked"
# Rows of experts.json whose time was that of Python, with operators that took longer to call than today.
SLOWER = ("nf4-2048", "nf4-full-attention-1")


def compare() -> dict[str, dict[str, Any]]:
    """Return each measured row with its plan."""
    made = {}
    measured, ours = json.loads(gpu.RESULTS.read_text()), gpu.ROWS | gpu.RECIPES
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "rows.jsonl").write_text(json.dumps({"text": "word " * 2**19}) + "\n")
        lengths = document_lengths(10**6, random.Random(0))
        lines = [json.dumps({"text": "w" * dataset_estimate.CHARACTERS * length}) for length in lengths]
        (place / "documents.jsonl").write_text("\n".join(lines) + "\n")
        for name, row in measured.items():
            if name not in ours or "failed" in row:
                continue
            found = planned_row(name, row, place)
            made[name] = compared(found, row["step_seconds"], row["peak_gib"], row["gpu"])
            if name in RAN_OUT:
                fewer = [f"train.per_device_train_batch_size={RAN_OUT[name]}"]
                fewer += [f"speed.activation_checkpointing={found.choices['activation checkpointing'].value}"]
                seconds = planned_row(name, row, place, fewer).step_seconds
                held = {"planned_seconds": seconds and round(seconds, 4), "measured_gib": None}
                made[name] |= {**held, "ran_out": ours[name].cap_gib}
        for name in [name for name in ours if name not in made]:  # rows without a measurement
            made[name] = compared(planned_row(name, {"gpu": "NVIDIA H200"}, place), None, None, "NVIDIA H200")
        for name, row in json.loads(multi_gpu.RESULTS.read_text()).items():
            if "step_seconds" in row:
                found = planned_launch(name, row, place)
                made[name] = compared(found, row["step_seconds"], row["peak_gib"], row["gpu"])
        for row in json.loads((HERE / "adapters.json").read_text()):
            if row["part"] == "shape" and row["type"] in COUNTED and "step_seconds" in row:
                found = planned_shape(row, place)
                name = f"1.1b-{row['type']}, {row['task']}"
                made[name] = compared(found, row["step_seconds"], row["gpu_memory_gib"], row["device"])
        for name, row in json.loads((HERE / "experts.json").read_text()).items():
            row_of = experts.ROWS.get(name.partition(",")[0])
            if name in SLOWER:
                continue
            if row_of and row_of.storage != "int8":  # a plan says that it does not know the speed of int8
                seconds = row["sequences"] * row["length"] / row["tokens_per_second"]
                found = planned_experts(name, row, place)
                made[f"experts-{name}"] = compared(found, seconds, row["peak_gib"], row["gpu"])
    return made


def planned_row(name: str, measured: dict[str, Any], place: Path, changes: Sequence[str] = ()) -> Plan:
    """Plan a row of gpu.py with the measured number of layers.

    Args:
        changes: more overrides.
    """
    row = (gpu.ROWS | gpu.RECIPES)[name]
    shape, stored = row.model.split("-")
    hidden, wide, whole, *rest = SHAPES[shape]
    layers = measured.get("layers") or row.layers or whole
    model = write_config(place / f"{shape}-{stored}-{layers}", (hidden, wide, layers, *rest), tied=False)
    data = place / ("documents.jsonl" if row.packed else "rows.jsonl")
    if row.recipe:
        job = gpu.Job(name, model, data, row.length, row.batch, 10, row, place)
        own = HERE.parent / "recipes" / "gpus" / row.recipe
        given = [*gpu.of_recipe(job, place / "run"), *row.changes, *changes, LOSS]
        return make(loader.load(own, given), measured["gpu"], row.cap_gib)
    sizes = {"length": row.length, "batch": row.batch, "steps": max(14, row.steps)}
    text = gpu.RECIPE.format(model=model, data=data, folder=place / "run", **sizes)
    path = place / f"{name}.yaml"
    path.write_text(text)
    return make(loader.load(path, [*row.changes, *changes, LOSS]), measured["gpu"], row.cap_gib)


def planned_launch(name: str, measured: dict[str, Any], place: Path) -> Plan:
    """Plan a row of multi_gpu.py with its launch config."""
    kind, count = name.rpartition(" x")[0], measured["gpus"]
    row = multi_gpu.ROWS[kind]
    shape, stored = row.model.split("-")
    hidden, wide, _, *rest = SHAPES[shape]
    layers = measured["layers"]
    model = write_config(place / f"{shape}-{stored}-{layers}", (hidden, wide, layers, *rest), tied=False)
    sizes = {"length": row.length, "batch": row.batch, "steps": 14}
    path = place / f"{kind}.yaml"
    path.write_text(gpu.RECIPE.format(model=model, data=place / "rows.jsonl", folder=place / "run", **sizes))
    rows = row.batch * (1 if row.shared else count)
    given = [f"train.effective_batch_size={rows}", *row.changes, *AS_MEASURED.get(name, ())]
    by, _ = sharding_cost.of_config(HERE.parent / "accelerate_configs" / f"{row.config}.yaml")
    by = by._replace(sharing=count) if row.shared else by  # as in multi_gpu.command
    if count == 1:  # without a launch, as in multi_gpu.command
        given += ["model.quantization=fp8"] * (row.config == "8xh100_fp8")
    if row.recipe:
        job = multi_gpu.Job(name, count, model, place / "rows.jsonl", row.length, row, 10, place)
        path, given = HERE.parent / "recipes" / row.recipe, gpu.of_recipe(job, place / "run")
    return make(loader.load(path, [*given, LOSS]), measured["gpu"], None, count, by if count > 1 else None)


def planned_shape(row: dict[str, Any], place: Path) -> Plan:
    """Plan a row of adapters.py on the 1.1B model."""
    model, rows = write_config(place / "1.1b", LARGE, tied=True), int(row["task"].split()[0])
    given = [f"adapter.type={row['type']}", f"model.name={model}", f"data.max_length={LARGE_LENGTH}"]
    given += [f"data.name={place}/rows.jsonl", "data.format=text", "data.train_on=all", "data.too_long=split"]
    given += ["data.validation=null", f"train.effective_batch_size={rows}", "train.max_steps=15"]
    given += [f"train.per_device_train_batch_size={rows}", "train.warmup_steps=0", *EAGER]
    given += [
        "model.quantization=auto"
        if row["type"][0] == "q" or row["type"] == "full"
        else "model.quantization=none"
    ]
    given = [text for text in given if row["type"] != "full" or not text.startswith("speed.fused")]
    own = HERE.parent / "recipes" / "adapters" / f"{row['type']}.yaml"
    return make(loader.load(own if own.exists() else QUICKSTART, given), row["device"], None)


def planned_experts(name: str, measured: dict[str, Any], place: Path) -> Plan:
    """Plan a row of experts.py."""
    row, model = experts.ROWS[name.partition(",")[0]], place / f"experts-{measured['layers']}"
    model.mkdir(exist_ok=True)
    sizes = experts.sizes_of(measured["layers"])
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_act": "silu", **sizes}))
    targets = "all-linear-and-experts" if row.experts else experts.ATTENTION
    given = [f"model.name={model}", f"adapter.target_modules={targets}", "adapter.r=16", "data.format=text"]
    given += [f"model.quantization={row.storage}", f"data.max_length={row.length}", "model.attention=cudnn"]
    given += [f"train.per_device_train_batch_size={row.sequences}", "data.validation=null"]
    given += [f"train.effective_batch_size={row.sequences}", "train.max_steps=15", "data.train_on=all"]
    given += [f"data.name={place}/rows.jsonl", "data.too_long=split", f"speed.fused={str(row.fused).lower()}"]
    given += [f"speed.compile={str(row.compile).lower()}", "speed.offload=none", "train.warmup_steps=0"]
    given += [f"speed.activation_checkpointing={row.checkpointing}"]
    given += [f"speed.fp8_experts={str(row.fp8_experts).lower()}"]
    given += ["speed.loss=chunked_fp8"] if row.fp8_loss else []
    return make(loader.load(QUICKSTART, given), measured["gpu"], measured.get("cap_gib"))


def make(
    loaded: Any,
    device: str,
    cap_gib: float | None,
    count: int = 1,
    by: sharding_cost.Sharding | None = None,
) -> Plan:
    known = next(name for name, kind in gpus.GPUS.items() if kind is gpus.of_device(device))
    machine, processes = planned_machine.find(known, count)
    if cap_gib:
        machine = replace(
            machine, memory_gib=cap_gib + memory_by_phase.CONTEXT_GIB
        )  # the cap applies only to the allocator
    return planner.make(loaded, machine, processes, by=by)


def write_config(folder: Path, shape: tuple[int, ...], *, tied: bool) -> Path:
    """Return a folder with the config.json of a Llama model, without weights."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size")
    folder.mkdir(exist_ok=True)
    config = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config | dict(zip(names, shape, strict=True))))
    return folder


def compared(made: Plan, seconds: float | None, peak: float | None, device: str) -> dict[str, Any]:
    """Return a row of plan.json. `None` means that there is no measurement."""
    assert made.step_seconds is not None
    return {
        "planned_seconds": round(made.step_seconds, 4),
        "measured_seconds": seconds and round(seconds, 4),
        "planned_gib": round(made.peak, 2),
        "measured_gib": peak and round(peak, 2),
        "activation_checkpointing": made.choices["activation checkpointing"].value,
        "gpu": device,
    }


def off(row: dict[str, Any], what: str) -> float:
    """Return the relative error of a plan: 0.1 means that the plan is 10% too high."""
    return row[f"planned_{what}"] / row[f"measured_{what}"] - 1


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a Markdown table with the number of rows within the bounds."""
    lines = ["| | step, s: planned | measured | | peak GiB: planned | measured | |", "|---|" + "---|" * 6]
    for name, row in sorted(rows.items(), key=lambda pair: pair[1]["measured_seconds"] is None):
        step = f"{row['planned_seconds']:.3f} | {_beside(row, 'seconds', 3)}"
        shown = name.replace(" rows", " sequences")
        lines.append(f"| {shown} | {step} | {row['planned_gib']:.1f} | {_beside(row, 'gib', 1)} |")
    return "\n".join(lines) + f"\n\n{verdict(rows)}\n"


def _beside(row: dict[str, Any], what: str, digits: int) -> str:
    """Return the cells of the measurement and of the plan's error."""
    if what == "gib" and "ran_out" in row:
        return f"ran out of {row['ran_out']:.0f} | miss"
    return f"{row[f'measured_{what}']:.{digits}f} | {off(row, what):+.0%}" if row[f"measured_{what}"] else "|"


def errors(rows: dict[str, dict[str, Any]], what: str) -> list[float]:
    """Return the absolute relative error of each measured row."""
    return [abs(off(row, what)) for row in rows.values() if row[f"measured_{what}"]]


def verdict(rows: dict[str, dict[str, Any]]) -> str:
    """Return the number of rows within the bounds and the largest error. Out of memory counts as a miss."""
    out = [name for name, row in rows.items() if "ran_out" in row]
    steps, peaks = (errors(rows, what) for what in ("seconds", "gib"))
    near = [sum(error <= NEAR[what] for error in of) for what, of in (("seconds", steps), ("gib", peaks))]
    text = f"{near[0]} of {len(steps)} steps within 15% (largest error {max(steps):.0%}), "
    text += f"{near[1]} of {len(peaks) + len(out)} peaks within 10% (largest error {max(peaks):.0%})"
    return text + (f". {', '.join(out)} was planned to fit and ran out of memory." if out else ".")


if __name__ == "__main__":
    sys.exit(main())
