"""What leaves a GPU for the CPU's memory: how much, how long it takes, and whether it may."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.planning import memory_by_phase, plan_report, planned_machine, planner, step_time, suggestions
from finetune.recipe import loader
from support.plans import planned

FULL = ("adapter.type=full", "train.learning_rate=1e-5", "data.max_length=2048", "data.too_long=split")


def test_an_optimizer_on_the_cpu_is_slower_and_never_offered_for_speed(large) -> None:
    whole, offloaded = planned(large, *FULL, gpu="b200"), planned(large, *FULL, "speed.offload=optimizer")
    assert whole.fits and offloaded.fits
    numbers = whole.trained
    assert offloaded.phases[memory_by_phase.HOST]["optimizer"] == pytest.approx(16 * numbers / 2**30)
    assert offloaded.parts["to the CPU and back"] >= 28 * numbers / step_time.HOST_ADAMW
    assert any("a rough guess" in note for note in offloaded.notes)
    found = suggestions.changes(loader.load(large, FULL), list(FULL), whole)
    assert ("speed.offload=optimizer",) not in [change.overrides for change in found]
    assert (offloaded.tokens_per_second or 0) < (whole.tokens_per_second or 0)


def test_copies_wait_for_what_computing_does_not_cover() -> None:
    step = step_time.Pass(4096, 4096, 2, "fp8", False, 0.0, 0.0, 1, False, leaving=50e9)
    assert step_time.copied(step, 0, forward=2.0, backward=3.0, rate=50e9) == 0
    assert step_time.copied(step, 0, forward=0.25, backward=0.5, rate=50e9) == 0.75 + 0.5
    stepped = step._replace(leaving=0.0, stepped=True)
    number = 10**9
    update = step_time.ADAMW_BYTES * number / step_time.HOST_ADAMW / 2  # of two passes
    assert step_time.copied(stepped, number, 1.0, 1.0, 50e9) == pytest.approx(update)


def test_auto_offloads_what_would_be_made_again(large) -> None:
    rows = ("train.per_device_train_batch_size=8", "train.effective_batch_size=8")
    given = ["model.quantization=fp8", "speed.compile=true", *rows]
    machine, _ = planned_machine.find("h100-80gb", 1)
    much, little = (
        planner.make(loader.load(large, given), replace(machine, host_gib=room), 1) for room in (64.0, 4.0)
    )
    kind, _, count = much.choices["offload"].value.partition(":")
    assert (
        much.choices["activation checkpointing"].value == "mlp_int8"
        and kind == "activations"
        and 0 < int(count) < 32
    )
    assert much.fits and much.host == pytest.approx(int(count) * 8 * 4096 * (3 * 4096 + 6144) * 2 / 2**30)
    assert much.parts["to the CPU and back"] == 0
    assert little.choices["offload"].value == "none" and little.choices[
        "activation checkpointing"
    ].value.startswith("mlp_int8:")
    assert "do not fit in CPU memory" in little.choices["offload"].reason and little.host == 0
    assert (little.tokens_per_second or 0) < (much.tokens_per_second or 0)


def test_activations_go_to_the_cpu_as_far_as_it_has_room(large) -> None:
    """As in a run: `mlp` where half of what is free holds it, else layers' inputs alone."""
    offloaded = loader.load(
        large, ["model.quantization=fp8", "speed.offload=activations", "speed.compile=true"]
    )
    machine, _ = planned_machine.find("h200", 1)
    unknown, much, little, none = (
        planner.make(offloaded, replace(machine, host_gib=room), 1) for room in (None, 64.0, 8.0, 2.0)
    )
    assert [made.choices["activation checkpointing"].value for made in (unknown, much)] == ["mlp", "mlp"]
    assert unknown.host == much.host == pytest.approx(18, rel=0.1)  # measured: 18 GiB
    assert little.choices["activation checkpointing"].value == "full" and little.host == pytest.approx(4)
    assert much.fits and little.fits and not none.fits
    assert "4.0 of 2.0 GiB of CPU memory" in plan_report.headline(offloaded, none)
    assert any("a run may use 64 GiB" in note for note in much.notes)
    assert any("which is not known for another machine" in note for note in unknown.notes)
