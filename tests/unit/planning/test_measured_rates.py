"""Rates of a plan: what `finetune doctor --measure` left, if for such a model, or those of the table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.autoconfig import memory_estimate
from finetune.cli import main
from finetune.core import verified_files
from finetune.hardware import gpus
from finetune.models import architecture
from finetune.planning import measured_rates, planned_machine, step_time
from finetune.profiling import roofline
from finetune.recipe import loader
from support.paths import QUICKSTART
from support.plans import planned

MEASURED = {
    "device": "NVIDIA H200", "date": "2026-11-22", "shapes": "hidden 4096, intermediate 14336",
    "product": 300e12, "fp8": 600e12, "forward": 2e14, "backward": 2e14, "bandwidth": 2e12,
}  # fmt: skip

WIDTHS = memory_estimate.Widths(4096, 14336, 4096, 6144, 32, 128256)  # an 8B Llama's


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path) -> None:
    """No ceilings of this machine but a test's own."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def keep(device: str, content: Any) -> None:
    """Write a file of rates, under the widths that it names."""
    named = re.findall(r"\d+", content.get("shapes", "") if isinstance(content, dict) else "")
    hidden, wide = map(int, named or (WIDTHS.hidden, WIDTHS.intermediate))
    path = measured_rates.file_of(device, WIDTHS._replace(hidden=hidden, intermediate=wide))
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)


def write(path: Path, content: Any) -> None:
    """As `finetune doctor --measure` does; what is no mapping, as it is."""
    signed = isinstance(content, dict)
    text = verified_files.signed({"of": path.name, **content}) if signed else json.dumps(content)
    path.write_text(content if isinstance(content, str) else text)


def test_ceilings_of_a_gpu_are_used_and_said(large) -> None:
    before = planned(large)
    keep("NVIDIA H200", MEASURED)
    after = planned(large)
    assert "doctor --measure" in after.source and "doctor" not in before.source
    assert (after.step_seconds or 0) > 1.8 * (before.step_seconds or 0)


def test_a_gpu_is_found_by_its_kind() -> None:
    """What torch calls the device, and what --gpu names."""
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100", planned_machine.find("h100", 1)[0].name)
    assert {measured_rates.file_of(name, WIDTHS).name for name in names} == {"h100-80gb-4096x14336.json"}
    assert measured_rates.file_of("NVIDIA H100 PCIe", WIDTHS).name == "h100-pcie-4096x14336.json"
    assert measured_rates.file_of("CPU", WIDTHS).name == "cpu-4096x14336.json"
    assert (
        measured_rates.file_of("NVIDIA GeForce GTX 1080", WIDTHS).name
        == "nvidia-geforce-gtx-1080-4096x14336.json"
    )


def test_rates_of_another_shape_are_not_taken(large) -> None:
    """Products of a model of width 256 say nothing of an 8B's."""
    before = planned(large)
    keep("NVIDIA H200", {**MEASURED, "shapes": "hidden 256, intermediate 688", "product": 1e11})
    after = planned(large)
    assert after.step_seconds == before.step_seconds
    assert "measured at hidden 256, intermediate 688, and this model has 4096 and 14336" in after.source
    one = memory_estimate.widths(architecture.read(loader.load(large).model).config)
    machine = planned_machine.find("h200", 1)[0]
    assert roofline.peaks(machine, one)[2] == "from its data sheet", "nor is a profile's roofline of them"
    keep("NVIDIA H200", {**MEASURED, "shapes": "hidden 8192, intermediate 28672"})  # 70B's: wide enough
    assert "doctor --measure` on" in planned(large).source


def test_what_was_measured_at_other_widths_is_kept(large) -> None:
    """The nearest is taken."""
    one = memory_estimate.widths(architecture.read(loader.load(large).model).config)
    own, small = measured_rates.file_of("NVIDIA H200", one), one._replace(hidden=256, intermediate=688)
    assert own.name == "h200-4096x14336.json"
    keep("NVIDIA H200", {**MEASURED, "shapes": "hidden 5120, intermediate 17920"})
    write(own, MEASURED)
    other = {**MEASURED, "shapes": "hidden 256, intermediate 688", "product": 1e11}
    write(measured_rates.file_of("NVIDIA H200", small), other)
    assert planned(large).source.endswith("on 2026-11-22, at hidden 4096, intermediate 14336")
    assert (measured_rates.read_for("NVIDIA H200", small)[0] or {})["product"] == 1e11
    own.unlink()
    assert planned(large).source.endswith("at hidden 5120, intermediate 17920")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "can't be read"),
        ({}, "no usable backward, bandwidth, forward, product, date, shapes"),
        ({key: MEASURED[key] for key in MEASURED if key != "forward"}, "no usable forward"),
        ({**MEASURED, "fp8": "fast"}, "no usable fp8"),
        ({**MEASURED, "product": 0}, "no usable product"),
        ({**MEASURED, "shapes": "?"}, "no usable shapes"),
        ("{", "can't be read"),
    ],
    ids=("a list", "an empty mapping", "a missing rate", "a text", "nothing", "no shapes", "half written"),
)
def test_a_broken_file_of_rates_is_said_and_not_used(large, content: Any, said: str) -> None:
    before = planned(large)
    keep("NVIDIA H200", content)
    after = planned(large)
    assert said in after.source and "run `finetune doctor --measure` to write it again" in after.source
    assert after.step_seconds == before.step_seconds


def test_doctor_measures_this_machine_and_the_plan_takes_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr(measured_rates, "SECONDS", {"cpu": 0.02})
    assert main.main(["doctor", str(QUICKSTART), "--measure"]) == 0
    one = memory_estimate.widths(architecture.read(loader.load(QUICKSTART).model).config)
    file = measured_rates.file_of("CPU", one)
    found = json.loads(file.read_text())
    assert str(file) in "".join(capsys.readouterr().out.split())
    assert {"product", "forward", "backward", "bandwidth", "layer"} <= found.keys()
    assert all(found[name] > 1e8 for name in ("product", "forward", "backward", "bandwidth", "layer"))
    assert measured_rates.cpu_rate(loader.load(QUICKSTART)) == found["layer"]
    said = step_time.of_cpu(one)
    assert said == f"one layer, by `finetune doctor --measure` on {found['date']}, at {found['shapes']}"
    write(file, {name: found[name] for name in found if name not in ("layer", "sha256")})
    assert measured_rates.cpu_rate(loader.load(QUICKSTART)) > 1e8  # timed anew
    assert step_time.of_cpu(one).startswith(
        f"one layer, timed now; finetune ignores {file}: it has no usable layer"
    )


@pytest.mark.parametrize("hidden", [48, 224, 576, 720, 3136, 5120])
def test_a_layer_of_any_width_can_be_timed(hidden: int) -> None:
    assert (
        measured_rates.layer(memory_estimate.Widths(hidden, 4 * hidden, hidden, 3 * hidden, 2, 1000), 0.001)
        > 0
    )


def test_an_adapters_rank_takes_time(large) -> None:
    """Six FLOPs for each trained number and token, in products too thin to run at full speed."""
    given = ("speed.compile=true", "speed.activation_checkpointing=none", "data.too_long=split")
    small, wide = (planned(large, *given, f"adapter.r={rank}") for rank in (16, 64))
    more = 6 * (wide.trained - small.trained) * 4 * 2500
    rate = step_time.THIN * step_time.PRODUCT * gpus.GPUS["h200"].bf16
    assert wide.parts["products"] - small.parts["products"] == pytest.approx(more / rate)
    assert (wide.step_seconds or 0) > 1.02 * (small.step_seconds or 0)
