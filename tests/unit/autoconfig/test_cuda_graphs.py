"""Which runs' layers are CUDA graphs by themselves.

GPUs run them in tests/gpu.
"""

from __future__ import annotations

import pytest

from finetune.autoconfig import cuda_graphs, memory_estimate
from finetune.core.run_checks import Choice
from finetune.distributed import launch_environment
from finetune.hardware.detection import Hardware
from finetune.models import architecture
from finetune.planning import memory_by_phase, plan_report, sharding_cost
from finetune.recipe import loader
from support.paths import QUICKSTART, ROOT
from support.plans import planned

H100 = Hardware("cuda", "NVIDIA H100", 1, (9, 0), 80.0, 8)
ON, OFF = Choice("on", "asked for"), Choice("off", "asked for")


@pytest.mark.parametrize(
    ("asked", "compile", "differs", "products", "found"),
    [
        (True, ON, "", 1e-3, ("on", "Python needs about")),
        ("auto", Choice("on", "auto"), "", 1e-3, ("on", "Python needs about")),
        (True, ON, "", 9e-3, ("off", "the GPU does not wait for Python")),
        (True, ON, "rows differ", 1e-3, ("off", "rows differ")),
        ("auto", OFF, "", 1e-3, ("off", "layers are not compiled")),
        ("default", ON, "", 1e-3, ("off", "asked for")),
        ("reduce-overhead", ON, "rows differ", 9e-3, ("on", "asked for")),
    ],
)
def test_layers_are_graphs_where_it_pays(
    asked: str | bool, compile: Choice, differs: str, products: float, found: tuple[str, str]
) -> None:
    chosen = cuda_graphs.choose(asked, compile, unsupported=differs, gemm_seconds=products, kind="fp8")
    assert chosen.value == found[0] and found[1] in chosen.reason


@pytest.mark.parametrize(
    ("options", "room", "found"),
    [
        ([], 30.0, ("none", "none", "on", "auto")),
        ([], 21.0, ("norms", "none", "on", "auto")),  # graphs take two of it
        ([], 18.5, ("norms", "none", "off", "layers are recomputed")),  # beside them layers would be
        (["speed.activation_checkpointing=full:8"], 30.0, ("full:8", "none", "off", "layers are recomputed")),
        (
            ["speed.activation_checkpointing=full", "speed.offload=activations"],
            30.0,
            ("full", "activations", "off", "offload their activations"),
        ),
        (["speed.activation_checkpointing=none"], 30.0, ("none", "none", "on", "auto")),
        (
            ["speed.activation_checkpointing=none"],
            20.5,
            ("none", "none", "off", "the 2 GiB of CUDA graphs do not fit"),
        ),
        (
            ["speed.activation_checkpointing=norms"],
            19.5,
            ("norms", "none", "off", "the 2 GiB of CUDA graphs do not fit"),
        ),
        (
            ["speed.activation_checkpointing=none", "speed.compile=reduce-overhead"],
            20.5,
            ("none", "none", "on", "auto"),
        ),
        (["speed.compile=reduce-overhead"], 18.5, ("norms", "none", "on", "auto")),
    ],
)
def test_by_themselves_graphs_fit_and_no_layer_is_made_again_whole(
    options: list[str], room: float, found: tuple[str, str, str, str]
) -> None:
    speed = loader.load(QUICKSTART, options).speed
    plan = memory_estimate.Memory(32, 20.0, 2.0, 0.1, room, graphs=2.0)
    again, offload, graphs, _ = cuda_graphs.choose_with_memory(
        Choice("on", "auto"), speed, speed.activation_checkpointing, plan, H100
    )
    assert (again.value, offload.value, graphs.value) == found[:3] and found[3] in graphs.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["data.packing=true"], ""),
        (["data.padding_free=true"], ""),
        ([], "padded batches"),
        (
            ["data.packing=true", "train.per_device_train_batch_size=auto"],
            "a search finds the micro-batch size",
        ),
        (["data.packing=true", "adapter.lora_dropout=0.1"], "dropout"),
        (["data.packing=true", "adapter.type=oft"], "not tested with adapter.type: oft"),
    ],
)
def test_passes_have_to_be_alike(changes: list[str], why: str) -> None:
    loaded = loader.load(QUICKSTART, changes)
    config = architecture.read(loaded.model).config
    searched = loaded.train.per_device_train_batch_size == "auto"
    kinds = {"attention": "varlen", "storage": "bf16", "searched": searched}
    found = cuda_graphs.unsupported_reason(loaded, config, single_process=True, **kinds)
    assert why in found and bool(why) == bool(found)
    assert why or "GPUs" in cuda_graphs.unsupported_reason(loaded, config, single_process=False, **kinds)


@pytest.mark.parametrize(
    ("config", "processes", "found"),
    [
        ("single_gpu", 1, True),
        ("8xh100_fp8", 1, True),  # the frozen fp8 base
        ("8xh100_fp8", 2, False),
        ("8xh100_fp8_torchao", 1, False),
        ("zero2_8", 1, False),
        ("fsdp2_8", 1, False),
    ],
)
def test_graphs_are_for_one_process_that_splits_nothing(config: str, processes: int, found: bool) -> None:
    """Asked by a run of its environment, and by a plan of the config's."""
    by, _ = sharding_cost.of_config(ROOT / "accelerate_configs" / f"{config}.yaml")
    with launch_environment.under(dict(by.variables)):
        assert cuda_graphs.is_single_plain_process(processes) == found


def test_a_plan_has_their_time_and_their_memory(large) -> None:
    """What they work in is held at the loss too, and while a run evaluates between steps."""
    small = [
        "data.packing=true",
        "data.max_length=2048",
        "data.validation_fraction=0.1",
        "model.quantization=fp8",
    ]
    small += [
        "eval.eval_steps=10",
        "train.per_device_train_batch_size=1",
        "speed.activation_checkpointing=none",
    ]
    made = planned(large, *small, "speed.compile=true", gpu="h200")
    without = planned(large, *small, "speed.compile=default", gpu="h200")
    assert made.choices["CUDA graphs"].value == "on"
    assert without.choices["CUDA graphs"] == ("off", "asked for")
    assert made.parts["launch gaps"] == 0 < without.parts["launch gaps"]
    assert sum(made.phases["step"].values()) > sum(without.phases["step"].values())
    assert made.phases["evaluation"]["CUDA graphs"] > made.phases["step"]["CUDA graphs"] > 0
    found = planned(large, *small, "speed.compile=true", "train.per_device_train_batch_size=auto", gpu="h200")
    assert "a search finds the micro-batch size" in found.choices["CUDA graphs"].reason
    devices = [kinds for name, kinds in made.phases.items() if name != memory_by_phase.HOST]
    assert {kind for kinds in devices for kind in kinds} <= set(plan_report.KINDS), "each has a column"
