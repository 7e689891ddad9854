"""finetune profile on a GPU: kernels by their kind, bottlenecks that were planted, a trace, a snapshot."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.profiling import profiler
from support.paths import QUICKSTART
from support.profiles import SlowLoader
from support.soak import soak_except

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
LARGE = ["data.max_length=2048", "data.packing=true", "speed.compile=true", "model.quantization=none"]
MAIN_PROCESS = ["train.dataloader_num_workers=0", "train.dataloader_prefetch_factor=null"]
MAIN_PROCESS.append("train.dataloader_persistent_workers=false")
PLANTED = {  # rows of a step, overrides, callbacks, and the verdict's words
    "data": (2, ["speed.compile=false", *MAIN_PROCESS], [SlowLoader()], "waits for data"),
    "batch": (1, ["speed.compile=false"], [], "because the batch is small"),
    "attention": (16, [*LARGE, "model.attention=eager"], [], "eager attention takes"),
    "none": (32, LARGE, [], "no other part is large"),  # beside which the loop's own 15 ms are little
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Llama-3.2-1B's widths, six layers; documents of real lengths."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        import gpu_inputs
    finally:
        sys.path.pop(0)
    folder = tmp_path_factory.mktemp("inputs")
    model = gpu_inputs.make_model(folder / "1b-bf16-6", "1b", "bf16", 6)
    data = gpu_inputs.make_data(folder / "rows.jsonl", 320_000, documents=True)
    given = [f"model.name={model}", f"data.name={data}", "data.format=text", "data.train_on=all"]
    return [*given, "data.too_long=split", "data.validation=null", "eval.forgetting=false", "eval.samples=0"]


def run(planted: str, inputs: list[str], folder: Path) -> profiler.Profile:
    rows, overrides, callbacks, _ = PLANTED[planted]
    batch = [f"train.{key}={rows}" for key in ("effective_batch_size", "per_device_train_batch_size")]
    return profiler.run(str(QUICKSTART), [*inputs, *batch, *overrides], str(folder), callbacks)


@pytest.mark.parametrize("planted", soak_except(["data", "batch", "none"], PLANTED))
def test_a_planted_bottleneck_is_named(planted: str, inputs: list[str], tmp_path: Path) -> None:
    found = run(planted, inputs, tmp_path)
    print(planted, found._asdict())
    assert PLANTED[planted][3] in found.verdict, found
    assert sum(found.shares.values()) == pytest.approx(1, abs=0.01) and min(found.shares.values()) >= 0
    traced: list[dict[str, Any]] = json.loads(found.trace.read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer"} <= {event.get("name") for event in traced}
    assert any(event.get("cat") == "kernel" for event in traced)
    assert found.roofline and 0.01 < found.roofline[0] < 1.1
    assert found.memory
    with found.memory.open("rb") as file:
        snapshot = pickle.load(file)  # torch wrote it a moment ago
    assert snapshot["segments"] and any(snapshot["device_traces"])
    if planted == "none":
        assert found.shares["products"] > 0.5 and found.shares["communication"] == 0
