"""A plan beside what a run does: what it refuses, how many rows at once it finds, what it says beside."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.adapters import attach
from finetune.autoconfig import batch_size, decisions
from finetune.cli import main
from finetune.core import run_checks
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.hardware import detection
from finetune.models import loading
from finetune.planning import (
    memory_by_phase,
    plan_report,
    planned_machine,
    planned_run,
    planned_spec,
    planner,
    sharding_cost,
    suggestions,
)
from finetune.preflight import choice_checks
from finetune.recipe import loader
from finetune.training import batch_search, batch_setup, step_work
from finetune.training.run_context import StepPlan
from support.paths import QUICKSTART, ROOT
from support.plans import LLAMA_8B, planned
from support.trainers import run_context

SHORT = ("data.max_length=1024", "data.too_long=split", "train.effective_batch_size=96", "speed.compile=true")
AUTO = "train.per_device_train_batch_size=auto"


@pytest.mark.parametrize(
    ("given", "gpu", "said", "code"),
    [
        (("adapter.target_modules=[q_porj]",), "h200", "matches no module of this model", 2),
        (("adapter.layers_to_transform=[40]",), "h200", "layers_to_transform", 2),
        (("train.optim=paged_adamw_8bit",), "", "a paged optimizer needs a GPU", 3),
        (("speed.offload=activations",), "", "offloading needs a GPU", 3),
    ],
)
def test_what_a_run_refuses_is_not_planned(
    large, capsys, given: tuple[str, ...], gpu: str, said: str, code: int
) -> None:
    """Also where there is the config of a model alone, whose names follow from it."""
    where = [str(large), "--gpu", gpu] if gpu else [str(QUICKSTART)]
    assert main.main(["plan", *where, *given]) == code
    assert said in capsys.readouterr().err
    assert main.main(["plan", str(large), "--gpu", "h200", "adapter.modules_to_save=[norm]"]) == 0


def test_names_of_a_model_inside_another_are_not_guessed(large) -> None:
    inner = {**LLAMA_8B, "model_type": "gemma3_text", "hidden_activation": "silu"}
    (large.parent / "8b" / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": inner})
    )
    assert planned(large, "adapter.target_modules=.*language_model.*q_proj").peak > 7


def test_an_offloaded_optimizer_is_for_one_process(large) -> None:
    full = ("adapter.type=full", "speed.offload=optimizer", "train.effective_batch_size=8")
    with pytest.raises(UserError, match="torchao's offloaded optimizer works only in one process"):
        planned(large, *full, count=2)


def test_a_batch_that_is_searched_is_the_largest_that_fits(large) -> None:
    """By the rule of batch_search: a divisor of the share, a tenth of memory to spare; what is recomputed was
    chosen for one row."""
    made = planned(large, *SHORT, AUTO, "model.quantization=none", gpu="h100-80gb")
    rows, one = made.batch.per_device, planned(large, *SHORT, "train.per_device_train_batch_size=1")
    assert 1 < rows < 96 and 96 % rows == 0 and made.batch.accumulation == 96 // rows
    most = batch_size.MARGIN * (made.machine.memory_gib - memory_by_phase.CONTEXT_GIB)
    assert made.usable <= most and made.fits
    assert (
        made.choices["activation checkpointing"].value
        == one.choices["activation checkpointing"].value
        == "none"
    )
    larger = next(size for size in batch_size.sizes(96, 96) if size > rows)
    stated = (
        f"train.per_device_train_batch_size={larger}",
        "speed.activation_checkpointing=none",
        "model.quantization=none",
    )
    assert planned(large, *SHORT, *stated, gpu="h100-80gb").peak > most
    assert any(f"=auto: the plan expects {rows} of 1024 tokens" in note for note in made.notes)
    given = [change for change, _ in suggestions.candidates(loader.load(large, [*SHORT, AUTO]), made)]
    assert not any("per_device" in text for change in given for text in change)


def test_no_batch_is_searched_where_weights_are_split(large) -> None:
    loaded, machine = loader.load(large, [*SHORT, AUTO]), planned_machine.find("h200", 2)
    with pytest.raises(UserError, match="the search runs before FSDP2 shards the weights"):
        planner.make(loaded, *machine, by=sharding_cost.FSDP2)


def test_evaluation_that_does_not_fit_is_in_the_first_line(large) -> None:
    given = ["eval.batch_size=64", "speed.compile=true", "data.validation_fraction=0.2"]
    made, loaded = planned(large, *given, gpu="rtx4090"), loader.load(large, given)
    assert made.fits and ": training fits, evaluation does not, " in plan_report.headline(loaded, made)
    auto = planned(large, *given, "eval.batch_size=auto", gpu="rtx4090")
    assert ": fits, " in plan_report.headline(loaded, auto)
    none = loader.load(large, ["eval.batch_size=64", "eval.forgetting=false"])
    assert ": fits, " in plan_report.headline(none, made)  # nothing is evaluated
    evaluated = sum(made.phases["evaluation"].values())
    both = f"training {made.peak:.1f} and evaluation {evaluated:.1f} of {made.usable:.1f} GiB"
    assert evaluated > made.peak and both in plan_report.headline(loaded, made)
    assert f": fits, {made.peak:.1f} of {made.usable:.1f} GiB" in plan_report.headline(none, made)


def test_a_merge_that_does_not_fit_is_said_with_what_helps(large) -> None:
    """fp32 weights of an 8B are 30 GiB; training on fp8 ones fits in 24."""
    made = planned(large, "data.max_length=1024", "train.per_device_train_batch_size=1", gpu="rtx4090")
    assert made.fits and sum(made.phases["merge"].values()) > made.usable
    (said,) = [note for note in made.notes if "merging" in note]
    assert said.endswith("GiB; on the CPU, run `ACCELERATE_USE_CPU=true finetune merge RUN`")
    assert not [note for note in planned(large).notes if "merging" in note]
    assert "merge" not in planned(large, "adapter.lora_bias=true").phases


def test_what_the_time_leaves_out_is_said(large) -> None:
    rows = dict(plan_report.times(planned(large), 2.0))
    assert "time, energy and cost exclude evaluation and saving" in rows["training"]


def test_more_gpus_than_a_host_has_are_said_to_be_planned_as_one(large) -> None:
    many, eight = (planned(large, "train.effective_batch_size=64", count=count) for count in (64, 8))
    assert any("assumes that all 64 GPUs are in one host" in note for note in many.notes)
    assert not any("one host" in note for note in eight.notes)


def test_rows_whose_lengths_are_not_known_are_said(large) -> None:
    assert any(
        "the data has 5 packed sequences of about 4,096 tokens" in note
        for note in planned(large, "data.packing=true").notes
    )
    streamed = planned(large, "data.streaming=true")
    assert any(
        "the examples are streamed, so the plan assumes 4096 tokens each" in note for note in streamed.notes
    )


def test_a_warm_up_that_outlasts_the_run_is_said_by_a_plan_too(large) -> None:
    made = planned(large, "train.max_steps=30", "train.warmup_steps=1000")
    assert (
        "the learning rate never reaches its peak: the warm-up takes 1,000 steps, and the run has 30"
        in made.notes
    )
    assert not any("peak" in note for note in planned(large, "train.warmup_steps=999").notes)


def test_a_cpu_is_not_told_what_was_measured_slower_there() -> None:
    """benchmarks/ablation.json: packing 0.69, one row at once 0.53 of the tokens/s."""
    ablation = json.loads((ROOT / "benchmarks" / "ablation.json").read_text())
    assert "packing" in json.dumps(ablation) and "accumulation" in json.dumps(ablation)
    here = detection.Hardware("cpu", "CPU", 1, (0, 0), 64.0, 2)
    loaded = loader.load(QUICKSTART, ["train.per_device_train_batch_size=4"])
    made = planner.make(loaded, here, 1, cpu_rate=1e10)
    given = [text for change, _ in suggestions.candidates(loaded, made) for text in change]
    assert made.fits and not [text for text in given if "packing" in text or "per_device" in text]
    tight = planner.make(loaded, replace(here, memory_gib=0.5), 1, cpu_rate=1e10)
    given = [text for change, _ in suggestions.candidates(loaded, tight) for text in change]
    assert not tight.fits and "train.per_device_train_batch_size=1" in given


@pytest.mark.parametrize(("kind", "why"), [("dora", "DoRA"), ("lokr", "lokr"), ("lora", "")])
def test_what_breaks_the_graph_is_not_compiled_by_auto(large, kind: str, why: str) -> None:
    """As speed.apply has it of a model's modules."""
    made = planned(large, f"adapter.type={kind}", "speed.fused=false", "model.quantization=none")
    said = f"auto: PEFT's forward pass of {why} breaks the graph of torch.compile"
    assert (made.choices["compile"] == ("off", said)) is bool(why)


def test_copies_of_every_weight_are_in_the_room_for_activations(large) -> None:
    """As step_work.work_of: autocast's of the linear layers, and DDP's of all gradients."""
    given = ["adapter.type=full", "train.learning_rate=1e-5", "train.effective_batch_size=8"]
    loaded = loader.load(large, given)
    machine, _ = planned_machine.find("b200", 2)
    run, _ = planned_run.planned_run(loaded, machine, 2, sharding_cost.DDP)
    spec, found = planned_spec.model_spec(run, fused=False), run.model
    kept = decisions.keeps_of(spec, 1, "auto", fused=False, compiled=True)
    linear = sum(outputs * inputs for outputs, inputs in found.linear.values()) + 128256 * 4096

    def left(precision: str, by: sharding_cost.Sharding) -> float:
        shared = sharding_cost.share(by, 2, 0.0, 0.0, 0)
        asked = replace(run, storage="fp32", target=replace(run.target, precision=precision))
        asked = planned_spec.work(asked, shared, 100.0, searched=False)
        return decisions.plan_memory(spec, asked, kept, "none").room

    whole = left("no", sharding_cost.ONE)
    assert whole - left("bf16", sharding_cost.ONE) == pytest.approx(2 * linear / 2**30)
    more = left("bf16", sharding_cost.ONE) - left("bf16", sharding_cost.DDP)
    assert more == pytest.approx(4 * found.parameters / 2**30)


@pytest.mark.parametrize(
    ("given", "gpu"),
    [
        (("adapter.type=adalora", "adapter.init_r=24"), "rtx4090"),
        (("adapter.type=full", "train.optim=adamw_8bit", "train.effective_batch_size=16"), "h200"),
        (("adapter.type=full", "train.optim=adafactor", "train.effective_batch_size=16"), "h200"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[1],
)
def test_what_auto_recomputes_is_the_least_that_fits(large, given: tuple[str, ...], gpu: str) -> None:
    """By what the recipe's own optimizer and adapter hold, not by AdamW's of LoRA."""
    given = (*given, "speed.compile=true")
    auto = planned(large, *given, gpu=gpu)
    count = int(auto.choices["activation checkpointing"].value.partition(":")[2])
    assert auto.fits and 1 < count < 32
    fewer = planned(large, *given, f"speed.activation_checkpointing=full:{count - 4}", gpu=gpu)
    assert not fewer.fits


def test_bytes_of_what_trains_are_those_of_the_run() -> None:
    """DDP's copy of gradients and AdaLoRA's averages are held beside moments."""
    for kind, gpus, each in (("lora", 1, 12), ("lora", 2, 16), ("adalora", 1, 24), ("adalora", 2, 28)):
        loaded = loader.load(QUICKSTART, [f"adapter.type={kind}"])
        setup = choice_checks.setup_of(loaded)
        launch = replace(setup.launch, processes=gpus)
        real = attach.attach(loading.load(loaded.model, setup, "cpu"), loaded.adapter, 100, RunChecks())
        assert (
            step_work.work_of(real, loaded, replace(setup, launch=launch), 64, 0.0).bytes_per_parameter
            == each
        )
    for precision, each in (("bf16", 28), ("no", 24)):  # and DeepSpeed's own in fp32
        launch = replace(setup.launch, processes=2, splitter="DeepSpeed", precision=precision)
        assert (
            step_work.work_of(real, loaded, replace(setup, launch=launch), 64, 0.0).bytes_per_parameter
            == each
        )
        assert (
            step_work.optimizer_bytes_per_parameter(loaded, replace(setup, launch=launch)) == (each - 4) / 2
        ), "each has its part"
    light = loader.load(QUICKSTART, ["adapter.type=adalora", "train.optim=sgd"])
    assert step_work.work_of(real, light, setup, 64, 0.0).bytes_per_parameter == 4 + 12


def test_a_search_and_a_failed_step_know_the_same_bytes(monkeypatch) -> None:
    loaded = loader.load(QUICKSTART, ["adapter.type=adalora"])
    setup, split, chosen = (
        choice_checks.setup_of(loaded),
        batch_size.Batch(4, 2, 2),
        run_checks.Choice("trl", ""),
    )
    setup = replace(setup, launch=replace(setup.launch, processes=2))
    names = "speed.loss", "speed.compile", "CUDA graphs", "speed.activation_checkpointing"
    fast = dict.fromkeys(names, chosen)
    seen: list[Any] = []
    monkeypatch.setattr(
        batch_search, "search", lambda *given: seen.append(given[3].bytes_per_parameter) or split
    )
    run = run_context(loaded, setup)
    plan: Any = StepPlan(split, 1, {}, fast)
    data: Any = SimpleNamespace(
        prepared=SimpleNamespace(train=None), tokenizer=SimpleNamespace(pad_token_id=0)
    )
    batch_setup.search_batch(run, data, None, plan)
    made = batch_setup.micro_batches(run, plan)
    assert [*seen, made.needs.args[-1]] == [8 + 4 + 12] * 2


def test_what_auto_recomputes_in_vain_may_all_be_recomputed(large) -> None:
    full = ["adapter.type=full", "train.effective_batch_size=16", "train.optim=ademamix"]
    loaded, now = loader.load(large, full), planned(large, *full, gpu="h200")
    assert not now.fits and "-" not in now.choices["activation checkpointing"].reason
    assert ("speed.activation_checkpointing=full",) in [
        change for change, _ in suggestions.candidates(loaded, now)
    ]


def test_what_compiling_takes_at_the_start_is_in_what_is_faster(large) -> None:
    """In a run of 6 s it takes 25 s more."""
    for steps, worth in ((4, False), (2000, True)):
        given = ["speed.compile=false", "speed.activation_checkpointing=none", f"train.max_steps={steps}"]
        loaded, now = loader.load(large, given), planned(large, *given)
        change = ("speed.compile=true",)
        assert change in [change for change, _ in suggestions.candidates(loaded, now)]
        quick = planned(large, *given, *change)
        assert (quick.tokens_per_second or 0) > suggestions.FASTER * (now.tokens_per_second or 0)
        assert ((quick.seconds or 0) < (now.seconds or 0)) is worth
        assert (change in [found.overrides for found in suggestions.changes(loaded, given, now)]) is worth


def test_the_cost_of_steps_that_are_not_known_is_of_a_billion_tokens(large) -> None:
    given = ("train.max_steps=null", "train.num_train_epochs=1", "train.effective_batch_size=16")
    made = replace(planned(large, *given, count=8), steps=None)
    hours = 1e9 / (made.tokens_per_second or 0) / 3600 * 8
    cost = dict(plan_report.times(made, 2.5))["cost"]
    assert cost.startswith(f"{hours * 2.5:,.2f} per billion tokens") and f"{hours:,.2f} device hours" in cost
    assert dict(plan_report.times(replace(made, parts={}), 2.5))["cost"] == "not known"
    assert "cost" not in dict(plan_report.times(made, None))
