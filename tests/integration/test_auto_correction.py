"""`auto` that runs out of memory in the first step takes the next stronger setting and starts again."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from finetune.autoconfig import activation_checkpointing, batch_size
from finetune.autoconfig.batch_size import Batch
from finetune.recipe import loader
from finetune.training import auto_correction, pipeline
from finetune.training.auto_correction import CHECKPOINTING, MICRO_BATCH, Change, Correction
from support.faults import Fault, injected
from support.faulty_runs import FEW, same, weights
from support.paths import QUICKSTART
from support.runs import metrics, run_checks

FOUR = "train.per_device_train_batch_size=4"


def set_by(run: Any) -> dict[str, tuple[str, ...]]:
    """Each key of recipe.resolved.yaml with its value and who set it."""
    lines = run.recipe.read_text().splitlines()
    keys = (line.strip().partition(": ") for line in lines if " # " in line)
    return {key: tuple(part.strip(' "') for part in rest.split(" # ", 1)) for key, _, rest in keys}


def numbers(run: Any) -> list[list[float]]:
    names = ("step", "tokens", "learning_rate", "loss", "grad_norm")
    return [[line[name] for name in names] for line in metrics(run)]


def test_auto_after_out_of_memory_equals_a_run_with_the_stronger_setting(train) -> None:
    """Dropout, the order of examples and the adapter's initialization are those of a fresh run."""
    told = train(*FEW, FOUR, f"{CHECKPOINTING}=norms", name="told")
    with injected(Fault("oom", step=1)):
        run = train(*FEW, FOUR)
    assert numbers(run) == numbers(told) and len(numbers(run)) == 4
    assert same(weights(run), weights(told))
    log = (run.path / "log.txt").read_text()
    said = (
        "note: the first step ran out of memory with speed.activation_checkpointing: none; "
        "`auto` takes norms and starts the run again"
    )
    assert log.count(said) == 1 and log.count("removed") == 0
    assert set_by(run)["activation_checkpointing"] == (
        "norms",
        "auto after out of memory: the first step did not fit with none",
    )
    made = run_checks(run)[f"{CHECKPOINTING}, auto after out of memory"]
    assert (made["expected"], made["actual"]) == ("none", "norms")
    assert run_checks(run)[CHECKPOINTING]["actual"].endswith("norms")


@pytest.mark.soak
def test_auto_after_out_of_memory_halves_the_micro_batch_last(train) -> None:
    """4 sequences never fit: first all checkpointing, then 2 sequences with twice the accumulation."""
    told = train(*FEW, f"{CHECKPOINTING}=full", "train.per_device_train_batch_size=2", name="told")
    with injected(Fault("oom", rows=2)):
        run = train(*FEW)  # 8 sequences in one forward pass
    assert numbers(run) == numbers(told) and same(weights(run), weights(told))
    assert yaml.safe_load(run.recipe.read_text())["train"]["per_device_train_batch_size"] == 2
    assert set_by(run)["per_device_train_batch_size"][1].startswith(
        "auto after out of memory: the first step did not fit with 8, 4: "
        "effective batch size 8 = micro-batch 2 x 4 accumulation"
    )
    steps = [(r["expected"], r["actual"]) for r in run.read("checks.json") if "auto after" in r["option"]]
    assert steps == [("none", "norms"), ("norms", "full"), ("8", "4"), ("4", "2")]
    assert run_checks(run)["train.effective_batch_size"]["passed"]


@pytest.mark.soak
def test_a_resumed_run_keeps_what_auto_corrected(train) -> None:
    given = [*FEW, "train.save_steps=2"]
    with injected(Fault("oom", rows=2)):
        whole = train(*given, name="whole")
        train(*given, "--until=2", code=75)
    run = train(*given, "--resume")
    assert numbers(run) == numbers(whole) and same(weights(run), weights(whole))
    resolved = yaml.safe_load(run.recipe.read_text())
    assert resolved["train"]["per_device_train_batch_size"] == 2
    assert resolved["speed"]["activation_checkpointing"] == "full"


def test_a_searched_batch_is_halved_after_out_of_memory(train) -> None:
    """The search takes what fits by its own trials; the first step needs more than they did."""
    with injected(Fault("oom", step=1)):
        run = train(*FEW, f"{CHECKPOINTING}=full", "train.per_device_train_batch_size=auto")
    assert yaml.safe_load(run.recipe.read_text())["train"]["per_device_train_batch_size"] == 4
    assert run_checks(run)[f"{MICRO_BATCH}, auto after out of memory"]["expected"] == "8"


def test_stated_settings_are_not_corrected(train, capsys) -> None:
    with injected(Fault("oom", step=1)):
        train(*FEW, "train.per_device_train_batch_size=1", f"{CHECKPOINTING}=none", code=5)
    said = capsys.readouterr().err
    assert "step 1 ran out of memory with a micro-batch size of 1" in said and "auto" not in said


def test_a_later_step_is_not_corrected(train) -> None:
    with injected(Fault("oom", step=3)):
        run = train(*FEW, FOUR)
    log = (run.path / "log.txt").read_text()
    assert "step 3 ran out of memory and runs again with a micro-batch size of 2" in log
    assert not any("auto after" in r["option"] for r in run.read("checks.json"))


def test_memory_that_ends_in_the_optimizer_is_corrected_too(train, monkeypatch) -> None:
    """AdamW's state is allocated in its first step, outside of forward and backward."""
    step, failed = torch.optim.AdamW.step, []

    def short_of_memory(self, *given, **named):
        if not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, *given, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", short_of_memory)
    run = train(*FEW, FOUR)
    assert set_by(run)["activation_checkpointing"][0] == "norms" and len(metrics(run)) == 4


def test_nothing_of_the_first_attempt_is_held(train, monkeypatch) -> None:
    """The model that ran out of memory is gone when the next one is loaded."""
    held: list[int] = []
    load = pipeline.model_setup.adapted_model

    def counted(*given):
        gc.collect()
        base = [one for one in gc.get_objects() if type(one).__name__ == "PeftModelForCausalLM"]
        held.append(len(base))
        return load(*given)

    monkeypatch.setattr(pipeline.model_setup, "adapted_model", counted)
    with injected(Fault("oom", step=1)):
        train(*FEW, FOUR)
    assert len(held) == 2 and held[1] <= held[0]


@pytest.mark.parametrize(
    ("level", "fused_mlps", "offloads", "stronger"),
    [
        ("none", False, False, ["norms", "full"]),
        ("none", True, False, ["norms", "mlp", "full"]),
        ("mlp:8", True, False, ["mlp", "full"]),
        ("mlp_int8", True, False, ["mlp", "full"]),
        ("mlp_int8:4", True, False, ["mlp", "full"]),
        ("mlp_int8", True, True, ["full"]),
        ("full:3", False, False, ["full"]),
        ("full", True, False, []),
    ],
)
def test_stronger_level_goes_up_to_full(level, fused_mlps, offloads, stronger) -> None:
    found, now = [], level
    while now := activation_checkpointing.stronger_level(now, fused_mlps=fused_mlps, offloads=offloads):
        found.append(now)
        offloads = False
    assert found == stronger


@pytest.mark.parametrize(
    ("batch", "sizes"), [(Batch(16, 4, 4), [2, 1]), (Batch(6, 6, 1), [3, 1]), (Batch(5, 5, 1), [1])]
)
def test_smaller_micro_batch_keeps_the_effective_batch(batch: Batch, sizes: list[int]) -> None:
    found = []
    while size := batch_size.smaller_micro_batch(batch):
        batch = batch_size.with_micro_batch(batch, size)
        assert batch.per_device * batch.accumulation == batch.effective
        found.append(size)
    assert found == sizes


def test_next_change_skips_what_a_run_would_refuse() -> None:
    """TransformerEngine's fp8 recomputes nothing, CUDA graphs that are asked for no whole layer."""
    recipe, how = loader.load(QUICKSTART), {"fused_mlps": False, "offloads": False}
    batch = Batch(8, 4, 2)
    found = auto_correction.next_change(recipe, "none", batch, lambda change: "full" in change, **how)
    assert found == Change(CHECKPOINTING, "none", "full")
    found = auto_correction.next_change(recipe, "norms", batch, lambda change: False, **how)
    assert found == Change(MICRO_BATCH, "4", "2")
    assert auto_correction.next_change(recipe, "full", Batch(8, 1, 8), lambda change: True, **how) is None


def test_a_correction_survives_the_way_to_a_new_process(monkeypatch) -> None:
    changes = (Change(CHECKPOINTING, "none", "norms"), Change(CHECKPOINTING, "norms", "full"))
    given = Correction(changes, "runs/one", True)
    screen: Any = SimpleNamespace(said=[], flush=lambda: None)
    screen.say = screen.said.append
    seen: list[str] = []
    corrector = auto_correction.Corrector(given, screen, alone=True)
    with pytest.raises(auto_correction.StartAgain) as again:
        corrector.start_again()
    assert again.value.correction == given and len(screen.said) == 1
    monkeypatch.setattr(
        auto_correction.restart_together,
        "FirstStepWatch",
        lambda variable, announce: SimpleNamespace(request=seen.append),
    )
    auto_correction.Corrector(given, screen, alone=False).start_again()
    monkeypatch.setenv(auto_correction.VARIABLE, seen[0])
    assert auto_correction.from_environment() == given
    choice = given.choice(CHECKPOINTING)
    assert choice and choice.value == "full" and "none, norms" in choice.reason
    assert given.micro_batch is None


@pytest.mark.parametrize(
    ("error", "means"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("NCCL error: unhandled cuda error; Failed to CUDA calloc 6291456 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: Exception, means: bool) -> None:
    assert auto_correction.out_of_memory(error) is means
