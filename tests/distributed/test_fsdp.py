"""`finetune train` with FSDP2 on two CPU ranks, from the recipe to the saved weights, and with `--resume`.

Accelerate uses DDP on CPUs. In these processes it takes the CPUs for GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from finetune.autoconfig import decisions, machine_setup
from finetune.autoconfig.compilation import Work
from finetune.checkpointing import checkpoints, resume_contract
from finetune.core.errors import UserError
from finetune.models import loading
from finetune.quantization import four_bit
from finetune.recipe import loader
from finetune.recipe.schema import Eval, Train
from finetune.run_folder.run_folder import RunFolder
from finetune.speed.live_model_spec import live_model_spec
from finetune.training import checkpoint_room, step_work, stopping
from support import fsdp_on_cpus, two_ranks
from support.paths import QUICKSTART
from support.runs import digests
from support.soak import soak_except

# Whether rank 0 alone reads the base, the launch's precision, and how near losses come to one process's:
# FSDP computes with every parameter in bf16, autocast leaves norms in fp32
KINDS = {"lora": ("false", "no", 2e-6), "full": ("true", "bf16", 0.01)}
# In fp32; whether rank 0 alone reads the base: not under fsdp2_8_quantized
OTHERS = [("dora", "false"), ("ia3", "true"), ("vera", "false")]


def one_rank_as_on_gpus(arguments: list[str]) -> None:
    """Copy tensors as CUDA does: every NaN of 16 bits becomes the same NaN (pytorch #159333)."""
    copied = torch._foreach_copy_

    def through_fp32(to: Any, given: Any, *more: Any) -> None:
        for tensor, made in zip(given, seen := [one.clone() for one in given], strict=True):
            if tensor.dtype in (torch.bfloat16, torch.float16):
                made.view(torch.int16)[tensor.isnan()] = 0x7FFF
        copied(to, seen, *more)

    torch._foreach_copy_ = through_fp32
    fsdp_on_cpus.command(arguments)


def one_rank_in_16_bits(arguments: list[str]) -> None:
    """Gather 4-bit weights as numbers of 16 bits, as an older version did."""
    policy, packed = MixedPrecisionPolicy(torch.bfloat16, torch.float32), four_bit.pack
    four_bit.fsdp_policy = lambda *_: policy
    four_bit.pack = lambda base: packed(base, torch.bfloat16)
    one_rank_as_on_gpus(arguments)


@pytest.fixture(scope="module")
def runs(small, untied, tmp_path_factory) -> Callable[..., RunFolder]:
    """`runs(kind)`: a run of four steps. `runs(kind, "again")`: a run that resumes from its second step."""
    folder = tmp_path_factory.mktemp("fsdp")
    given = [
        *small,
        f"model.name={untied}",
        "train.max_steps=4",
        "train.warmup_steps=0",
        "train.save_steps=2",
    ]
    given += [
        "train.effective_batch_size=2",
        "train.logging_steps=1",
        "eval.forgetting=false",
        "eval.samples=0",
    ]
    given += ["eval.max_new_tokens=1", "train.learning_rate=1e-3", "train.save_total_limit=5"]

    @functools.cache
    def of(kind: str, part: str = "") -> RunFolder:
        by_rank_0, precision, _ = KINDS[kind]
        launch = fsdp_on_cpus.ENVIRONMENT | {"FSDP_CPU_RAM_EFFICIENT_LOADING": by_rank_0}
        launch["ACCELERATE_MIXED_PRECISION"] = precision
        run, left_out = folder / f"{kind}{part}", ("step-4", "adapter", "model", "eval.json")
        words = [
            "train",
            str(QUICKSTART),
            f"adapter.type={kind}",
            *given,
            f"train.output_dir={run}",
            "--quiet",
        ]
        if part:
            shutil.copytree(of(kind).path, run, ignore=shutil.ignore_patterns(*left_out))
        two_ranks.run(fsdp_on_cpus.command, [*words, *(["--resume"] if part else [])], **launch)
        return RunFolder(run)

    return of


@pytest.mark.parametrize("kind", soak_except(["lora"], KINDS))
def test_the_weights_are_split_and_what_is_saved_is_whole(
    kind: str, runs: Callable[..., RunFolder], untied, train, monkeypatch
) -> None:
    _, precision, near = KINDS[kind]
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    folder = runs(kind)
    run_checks = {one["option"]: one for one in json.loads((folder.path / "checks.json").read_text())}
    assert run_checks["sharded by FSDP"]["actual"].startswith("50.0%")
    assert run_checks["saved tensors"]["passed"] and run_checks["saved weights"]["passed"]
    assert run_checks["speed.loss"]["actual"].startswith("chunked"), (
        "of a head that trains, and is split, too"
    )
    alone = train(
        f"adapter.type={kind}",
        f"model.name={untied}",
        "train.max_steps=4",
        "train.effective_batch_size=2",
        "train.logging_steps=1",
        "train.learning_rate=1e-3",
        "eval.max_new_tokens=1",
    )
    both = [losses(one) for one in (folder, alone)]
    assert both[0] == pytest.approx(both[1], rel=near)


def on_two_ranks(
    given: list[str],
    small: tuple[str, str],
    place: Path,
    by_rank_0: str,
    precision: str = "no",
    rank: Any = fsdp_on_cpus.command,
) -> dict[str, Any]:
    """Train on two ranks into `place`. Return the run checks by option, which must all have passed."""
    launch = fsdp_on_cpus.ENVIRONMENT | {"FSDP_CPU_RAM_EFFICIENT_LOADING": by_rank_0}
    launch["ACCELERATE_MIXED_PRECISION"] = precision
    words = [
        "train",
        str(QUICKSTART),
        *small,
        *given,
        "train.warmup_steps=0",
        "eval.forgetting=false",
        "--quiet",
    ]
    two_ranks.run(rank, [*words, f"train.output_dir={place}"], **launch)
    run_checks = json.loads((place / "checks.json").read_text())
    assert all(one["passed"] for one in run_checks)
    return {one["option"]: one["actual"] for one in run_checks}


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "by_rank_0"), OTHERS)
def test_other_adapters_train_what_one_process_does(
    kind: str, by_rank_0: str, small, untied, train, tmp_path
) -> None:
    given = [f"adapter.type={kind}", f"model.name={untied}", "train.max_steps=3", "train.learning_rate=1e-3"]
    given += ["train.effective_batch_size=4", "train.logging_steps=1", "eval.max_new_tokens=1"]
    found = on_two_ranks(given, small, tmp_path / "two", by_rank_0)
    assert found["sharded by FSDP"].startswith("50.0%")
    assert losses(RunFolder(tmp_path / "two")) == pytest.approx(losses(train(*given)), rel=2e-6)


@pytest.mark.soak
def test_4_bit_codes_are_gathered_bit_for_bit(small, untied, train, tmp_path, monkeypatch) -> None:
    """CUDA changes some bits when it copies numbers of 16 bits, so the weights must be bytes."""
    given = ["adapter.type=qlora", f"model.name={untied}", "train.max_steps=3", "train.learning_rate=1e-3"]
    given += ["train.effective_batch_size=4", "train.logging_steps=1", "eval.max_new_tokens=1"]
    place = tmp_path / "two"
    found = on_two_ranks(given, small, place, "false", "bf16", one_rank_as_on_gpus)
    assert found["quantized weights that FSDP gathers"] == "all 14" and found["saved weights"] == "0"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert losses(RunFolder(place)) == pytest.approx(losses(train(*given)), rel=2e-3)
    with pytest.raises(AssertionError, match="quantized weights that FSDP gathers: a run check failed"):
        on_two_ranks(given, small, tmp_path / "once", "false", "bf16", one_rank_in_16_bits)


@pytest.mark.soak
def test_layers_that_are_split_compile_into_one_graph_each(small, two_layers, train, tmp_path) -> None:
    """The backward pass runs them again. On a GPU `auto` compiles them (`launch_environment.eager`)."""
    given = [f"model.name={two_layers}", "train.max_steps=2", "train.effective_batch_size=4"]
    given += ["speed.activation_checkpointing=full", "data.packing=true", "data.max_length=256"]
    given += ["train.logging_steps=1", "eval.max_new_tokens=1", "train.per_device_train_batch_size=2"]
    found = on_two_ranks([*given, "speed.compile=true"], small, tmp_path / "two", "true")
    assert found["sharded by FSDP"].startswith("50.0%") and found["speed.compile"].startswith(
        "0 graph breaks"
    )
    assert losses(RunFolder(tmp_path / "two")) == pytest.approx(losses(train(*given)), rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_bit_for_bit(kind: str, runs: Callable[..., RunFolder]) -> None:
    whole, again = runs(kind), runs(kind, "again")
    ends = [one.checkpoints / "step-4" for one in (whole, again)]
    for path in ends:
        checkpoints.verify(path)
    kept = [digests(path) for path in ends]
    tensors = {name for name in kept[0] if name.endswith(".safetensors")}
    assert {"weights.safetensors", "optimizer.safetensors"} <= tensors
    assert {name: kept[0][name] for name in tensors} == {name: kept[1][name] for name in tensors}
    assert losses(whole) == losses(again)
    optimizer = checkpoints.read_tensors(ends[0], "optimizer.safetensors")
    weights = checkpoints.read_tensors(ends[0], "weights.safetensors")
    moments = [tensor for name, tensor in optimizer.items() if name.endswith("exp_avg")]
    assert sorted(p.shape for p in moments) == sorted(p.shape for p in weights.values()), "whole, not parts"


def test_a_run_that_was_not_split_does_not_go_on_split_nor_the_other_way_round(
    runs: Callable[..., RunFolder],
) -> None:
    path = runs("lora").checkpoints / "step-2"
    kept = checkpoints.read_json(path, checkpoints.CONTRACT)
    facts = {name: value for name, value in kept["facts"].items() if name != "weights split by"}
    for then, now in ((facts, kept["facts"]), (kept["facts"], facts)):
        with pytest.raises(UserError, match="weights split by") as raised:
            resume_contract.compare({**kept, "facts": then}, {**kept, "facts": now}, path)
        assert raised.value.code == 4


def test_state_that_can_not_be_made_whole_is_refused_by_name() -> None:
    low = loader.load(QUICKSTART, ["train.optim=adamw_torch_8bit"]).train
    for section, resumes in ((low.model_copy(update={"save_steps": 5}), None), (low, "newest")):
        with pytest.raises(UserError, match="FSDP, under adamw_torch_8bit") as raised:
            stopping.check(section, resumes, "FSDP")
        assert raised.value.code == 3
    stopping.check(low, None, "FSDP")
    stopping.check(Train(save_steps=5), "newest", "FSDP")
    stopping.check(Train(save_steps=5), "newest", "DeepSpeed")
    with pytest.raises(UserError, match="DeepSpeed in fp16"):
        stopping.check(Train(save_steps=5), None, "DeepSpeed in fp16")


@pytest.mark.parametrize(("limit", "fits"), [(10**6, False), (10**12, True)])
def test_rank_0_is_asked_for_the_memory_of_a_whole_checkpoint(limit: int, fits: bool, tmp_path) -> None:
    """A weight takes 12 bytes, so 0.77 M weights take 9.2 MB. It needs split weights and checkpoints."""
    (tmp_path / "memory.max").write_text(str(limit))
    (tmp_path / "memory.current").write_text("0")
    loaded = loader.load(QUICKSTART, ["adapter.type=full", "train.save_steps=2"])
    model, setup = (
        torch.nn.Linear(1024, 750),
        machine_setup.choose(attention="sdpa", base="auto", adapter_type="full"),
    )
    split = dataclasses.replace(
        setup, launch=dataclasses.replace(setup.launch, sharded="FSDP", splitter="FSDP")
    )
    no = loader.load(QUICKSTART, ["adapter.type=full", "train.save_strategy=no"])
    where = tmp_path / "run" / "checkpoints"
    for recipe, own in ((loaded, setup), (no, split)):
        checkpoint_room.check_space(model, recipe, own.launch, where, tmp_path)
    if fits:
        checkpoint_room.check_space(model, loaded, split.launch, where, tmp_path)
        return
    with pytest.raises(UserError, match="rank 0 has too little memory for a checkpoint") as raised:
        checkpoint_room.check_space(model, loaded, split.launch, where, tmp_path)
    assert raised.value.code == 3 and "save_strategy: no" in str(raised.value)


def test_checkpoints_that_hold_the_best_weights_are_counted_so(tmp_path, monkeypatch) -> None:
    loaded, model = loader.load(QUICKSTART, ["adapter.type=full"]), torch.nn.Linear(10, 10, bias=False)
    setup, told = machine_setup.choose(attention="sdpa", base="auto", adapter_type="full"), list[int]()
    monkeypatch.setattr(checkpoints, "check_space", lambda place, trained, each, keep: told.append(each))
    for evaluated in (Eval(), Eval(eval_steps=2), Eval(eval_steps=2, load_best_model_at_end=False)):
        recipe = loaded.model_copy(update={"eval": evaluated})
        checkpoint_room.check_space(model, recipe, setup.launch, tmp_path)
    assert told == [1200, 1600, 1200], "weights and moments in fp32"


def test_recomputation_is_planned_for_a_part_of_what_trains() -> None:
    """Each process holds its part of split weights, three whole layers and the weights outside of layers."""
    loaded = loader.load(QUICKSTART, ["adapter.type=full"])
    setup = machine_setup.choose(attention="sdpa", base="auto", adapter_type="full")
    launch = dataclasses.replace(setup.launch, processes=4, sharded="FSDP", splitter="FSDP")
    split = dataclasses.replace(setup, launch=launch)
    base = loading.load(loaded.model, setup, "cpu")
    whole = sum(p.nbytes for p in base.parameters())
    linear = sum(m.weight.numel() for m in base.modules() if isinstance(m, torch.nn.Linear))
    each = [sum(p.nbytes for p in layer.parameters()) for layer in base.model.layers]
    layers = sum(each[:3]) + whole - sum(each)
    work = step_work.work_of(base, loaded, split, 64, 0.0)
    assert work.parts == 4 and work.arriving_gib == pytest.approx(
        (whole / 4 + layers - whole) / 2**30, rel=1e-3
    )
    alone = step_work.work_of(base, loaded, setup, 64, 0.0)
    assert (alone.parts, alone.arriving_gib) == (1, 0)
    assert (work.bytes_per_parameter, alone.bytes_per_parameter) == (12, 12), "gradient and AdamW's moments"
    for processes, precision, more in ((1, "bf16", 2 * linear), (4, "no", 0), (4, "bf16", 2 * linear)):
        launch = dataclasses.replace(setup.launch, processes=processes, precision=precision)
        work = step_work.work_of(base, loaded, dataclasses.replace(setup, launch=launch), 64, 0.0)
        assert work.arriving_gib == pytest.approx(more / 2**30), "autocast's copies"
        assert work.bytes_per_parameter == (16 if processes > 1 else 12), "and the gradients DDP sends"
    spec = live_model_spec(base)
    kept = decisions.keeps_of(spec, 1, "auto", fused=False, compiled=False)

    def room_of(work: Work) -> float:
        return decisions.plan_memory(spec, work, kept, "none").room

    rooms = [room_of(Work(64, None, parts=parts)) for parts in (1, 4)]
    assert rooms[1] - rooms[0] == pytest.approx(12 * whole / 4 * 0.75 / 2**30, rel=1e-3)
    light = room_of(Work(64, None, bytes_per_parameter=6.0))
    assert light - rooms[0] == pytest.approx((12 - 6) * whole / 4 / 2**30, rel=1e-3)
    elsewhere = base.to("meta")  # where its head is a copy
    apart = sum(p.nbytes for p in elsewhere.parameters()) - whole
    whole, layers = whole + apart, layers + apart
    work = step_work.work_of(elsewhere, loaded, split, 64, 0.0)
    assert work.arriving_gib == pytest.approx((whole / 4 + layers) / 2**30, rel=1e-3)


def losses(folder: RunFolder) -> list[float]:
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]
