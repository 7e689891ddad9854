"""finetune plan: bytes as a real model has them, choices as a run makes them, changes that hold."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from finetune.adapters import attach
from finetune.autoconfig import machine_setup, optimizer_choice
from finetune.autoconfig.batch_size import Batch
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.data.audit import Report
from finetune.hardware import gpus
from finetune.models import architecture, loading
from finetune.planning import adapter_size, planned_machine, planner, sharding_cost, step_time, suggestions
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.training import step_work
from support.four_bit import in_four_bits
from support.paths import MODEL, QUICKSTART, ROOT
from support.plans import planned
from support.scripts import module_of


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path) -> None:
    """No ceilings of this machine but a test's own."""
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))


def adapted(*overrides: str) -> tuple[Any, adapter_size.Adapted, architecture.Architecture]:
    """The real model of a recipe with its adapter, and what is counted of both without it."""
    loaded = loader.load(QUICKSTART, overrides)
    setup = machine_setup.choose(attention="auto", base="auto", adapter_type=loaded.adapter.type)
    found = architecture.read(loaded.model)
    real = attach.attach(loading.load(loaded.model, setup, "cpu"), loaded.adapter, 100, RunChecks())
    return real, adapter_size.adapted(loaded.adapter, loaded.model, found, 100), found


@pytest.mark.parametrize(
    "overrides",
    [
        ("adapter.type=lora", "adapter.r=5"),
        ("adapter.type=lora", "adapter.rank_pattern={q_proj: 4, layers.1.mlp.up_proj: 9}"),
        (
            "adapter.type=dora",
            "adapter.target_modules=[q_proj, down_proj]",
            "adapter.layers_to_transform=[0, 3]",
        ),
        ("adapter.type=lora", "adapter.exclude_modules=[k_proj]"),
        ("adapter.type=lora", "adapter.modules_to_save=[norm]"),
        ("adapter.type=adalora",),
        ("adapter.type=ia3",),
        ("adapter.type=full", "train.learning_rate=1e-4"),
    ],
    ids=lambda given: " ".join(given),
)
def test_what_trains_is_counted_as_the_real_model_has_it(overrides: tuple[str, ...]) -> None:
    real, counted, found = adapted(*overrides)
    trains = [parameter for parameter in real.parameters() if parameter.requires_grad]
    assert counted.trained == sum(parameter.numel() for parameter in trains)
    frozen = [p for name, p in real.named_parameters() if not p.requires_grad and "ranknum" not in name]
    base = sum(p.nbytes for p in (frozen if counted.names else trains))
    assert architecture.weights(found, "fp32", "no") == base


def test_the_state_of_the_optimizer_is_what_adamw_keeps() -> None:
    real, counted, _ = adapted("adapter.type=lora")
    trains = [parameter for parameter in real.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trains, fused=True)
    for parameter in trains:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.dim())
    assert optimizer_choice.known_bytes("adamw_torch_fused") == held / counted.trained
    assert [optimizer_choice.known_bytes(name) for name in ("sgd", "adamw_bnb_8bit", "lion_8bit")] == [
        0.0,
        2.03,
        1.02,
    ]
    assert optimizer_choice.known_bytes("lomo") is None
    speed = loader.load(QUICKSTART).speed
    assert [optimizer_choice.state_bytes(name, speed) for name in ("sgd", "lomo")] == [0, 8]


def test_quantized_weights_are_counted_as_they_are_stored() -> None:
    from transformers import AutoModelForCausalLM

    found = architecture.read(Model(name=str(MODEL)))
    base = in_four_bits(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16))
    held = [m.weight for m in base.get_decoder().layers.modules() if type(m).__name__ == "Linear4bit"]
    states = [weight.quant_state for weight in held]
    scales = [t for s in states for t in (s.absmax, s.code, s.state2.absmax, s.state2.code)]
    real = sum(p.nbytes for p in base.parameters()) + sum(t.nbytes for t in scales)
    assert architecture.weights(found, "nf4", "bf16") == pytest.approx(real, rel=0.01)
    setup = machine_setup.choose(attention="auto", base="fp8", adapter_type="lora")
    coded = loading.load(Model(name=str(MODEL)), setup, "cpu")
    buffers = {name: buffer.nbytes for name, buffer in coded.named_buffers() if "inv_freq" not in name}
    real = sum(p.nbytes for p in coded.parameters()) + sum(buffers.values())
    assert architecture.weights(found, "fp8", "no") == real


def test_an_8b_llama_is_planned_as_it_was_measured(large) -> None:
    """benchmarks/plan.json holds every row; two of them here: 64.9 GiB and 0.695 s, 22.6 GiB and 1.399 s."""
    fast = planned(large, "speed.compile=true", "speed.activation_checkpointing=none")
    assert fast.choices["quantization"].value == "fp8" and fast.peak == pytest.approx(64.9, rel=0.03)
    small = planned(
        large, "model.quantization=none", "speed.compile=true", "speed.activation_checkpointing=full"
    )
    assert small.peak == pytest.approx(22.6, rel=0.03)
    assert sum(small.parts.values()) == small.step_seconds
    assert small.tokens_per_second == pytest.approx(4 * 2500 / (small.step_seconds or 1))


def test_what_does_not_fit_has_three_changes_that_do_and_hold(large) -> None:
    tight = ["speed.activation_checkpointing=none", "model.quantization=none", "train.max_steps=20"]
    loaded, now = loader.load(large, tight), planned(large, *tight, gpu="rtx4090")
    assert not now.fits
    found = suggestions.changes(loaded, tight, now)
    assert len(found) == 3
    for change in found:
        again = planned(large, *tight, *change.overrides, gpu="rtx4090")
        assert again == change.plan and again.fits and again.peak < now.peak
    speeds = [change.plan.tokens_per_second or 0 for change in found]
    assert speeds == sorted(speeds, reverse=True)


def test_what_fits_is_told_what_is_faster(large) -> None:
    slow = ["speed.activation_checkpointing=full", "model.quantization=none", "speed.fused=false"]
    now = planned(large, *slow)
    found = suggestions.changes(loader.load(large, slow), slow, now)
    assert now.fits and 1 <= len(found) <= 3
    for change in found:
        again = planned(large, *slow, *change.overrides)
        assert again == change.plan and again.fits
        assert (again.tokens_per_second or 0) > suggestions.FASTER * (now.tokens_per_second or 0)
    assert ("speed.activation_checkpointing=auto",) in [change.overrides for change in found]


def test_more_gpus_share_a_step(large) -> None:
    rows = ("train.effective_batch_size=32", "train.per_device_train_batch_size=4")
    one, eight = planned(large, *rows), planned(large, *rows, count=8)
    assert (one.batch.accumulation, eight.batch.accumulation, eight.processes) == (8, 1, 8)
    assert 6 < (eight.tokens_per_second or 0) / (one.tokens_per_second or 1) <= 8
    assert "communication" in eight.parts and "communication" not in one.parts


def test_four_h200_share_a_step_as_they_were_measured(large) -> None:
    """LoRA on an fp8 base under DDP: 21,287 tokens/s on one H200, 84,119 on four (a prototype's)."""
    one, four = (planned(large, f"train.effective_batch_size={4 * n}", count=n) for n in (1, 4))
    assert four.choices["quantization"].value == "fp8" and four.choices["launch"].value == "ddp_8"
    assert (four.tokens_per_second or 0) / (one.tokens_per_second or 1) == pytest.approx(
        84119 / 21287, rel=0.02
    )
    assert four.sent[0] == 2 * 4 * four.trained * 3 / 4  # adapters' gradients alone, in fp32
    assert four.phases["step"]["weights"] == one.phases["step"]["weights"]


def test_what_does_not_fit_whole_is_divided_and_gathered(large) -> None:
    """Full fine-tuning of 8B: weights and states lie on eight GPUs, two layers are whole at once."""
    full = ("adapter.type=full", "train.effective_batch_size=8", "data.max_length=2048")
    one, eight = (planned(large, *full, gpu="h100-80gb", count=count) for count in (1, 8))
    assert not one.fits and eight.fits and eight.by == sharding_cost.FSDP2
    for kind in ("weights", "optimizer"):
        assert eight.phases["step"][kind] == pytest.approx(one.phases["step"][kind] / 8)
    layer = 2 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) / 2**30
    ends = 2 * 2 * 128256 * 4096 / 2**30
    assert eight.phases["step"]["buffers"] == pytest.approx(ends + (2 + 2) * layer, rel=0.3)
    long = (*full[:1], "train.effective_batch_size=32", "train.per_device_train_batch_size=4")
    long = (*long, "speed.compile=true")
    h200 = planned(large, *long, gpu="h200", count=8)
    assert h200.choices["activation checkpointing"].value == "none", (
        "each GPU has an eighth of what AdamW keeps"
    )
    parameters = one.trained
    assert eight.sent[0] == pytest.approx((2 * 2 + 4) * parameters * 7 / 8, rel=0.001)


def test_gathering_waits_where_the_link_is_slow(large) -> None:
    split = ("model.quantization=none", "train.effective_batch_size=8")
    fast, slow = (
        planner.make(loader.load(large, split), *planned_machine.find(gpu, 8), by=sharding_cost.FSDP2)
        for gpu in ("h100-80gb", "h100-pcie")
    )
    assert fast.sent[0] == slow.sent[0] == pytest.approx(2 * 2 * 8.03e9 * 7 / 8, rel=0.01)
    assert fast.choices["fused"].value == "off" and "FSDP2 shards" in fast.choices["fused"].reason
    shares = [made.parts["communication"] / (made.step_seconds or 1) for made in (fast, slow)]
    assert shares[0] < 0.1 < shares[1]


@pytest.mark.parametrize(
    ("config", "by", "halves"),
    [
        ("ddp_4", sharding_cost.DDP, (1, 1)),
        ("fsdp2_8", sharding_cost.FSDP2, (8, 8)),
        ("8xh100_fp8_te", sharding_cost.DDP._replace(no_recompute=True), (1, 1)),
        ("zero2_8", sharding_cost.ZERO[2], (1, 8)),
        ("zero3_8", sharding_cost.ZERO[3], (8, 8)),
        ("context_parallel_4", sharding_cost.FSDP2._replace(sharing=4), (4, 4)),
    ],
)
def test_an_accelerate_config_says_how_it_is_divided(
    config: str, by: sharding_cost.Sharding, halves: tuple[int, int]
) -> None:
    found, processes = sharding_cost.of_config(ROOT / "accelerate_configs" / f"{config}.yaml")
    assert found._replace(precision="", variables=()) == by._replace(variables=()) and processes == (
        int(config[-1]) if config[-1].isdigit() else 8
    )
    share = sharding_cost.share(found, processes, 1.0, 1.0, 10**10)
    assert (share.weights, share.states) == halves
    assert share.outside == (halves[0] > 1)
    # a billion weights in 16 bits and half a billion gradients, by DeepSpeed's defaults
    assert share.gathered == pytest.approx(3e9 / 2**30 if found.half and halves[0] > 1 else share.outside)


def test_compiling_is_planned_for_the_tokens_that_rows_have(large) -> None:
    """Short rows make a short run of it, in a plan and in a run."""
    words, rows = " ".join(["word"] * 40), large.parent / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": words}) for _ in range(4000)) + "\n")
    given = ("train.max_steps=200", "data.max_length=4096")
    assert planned(large, *given, gpu="h200").choices["compile"].value == "off"
    rows.write_text("\n".join(json.dumps({"text": " ".join([words] * 100)}) for _ in range(100)) + "\n")
    assert planned(large, *given, gpu="h200").choices["compile"].value == "on"
    report = Report(tokens=500, kept=10)
    for packing, tokens in (("false", 50), ("true", 256)):
        loaded = loader.load(QUICKSTART, [f"data.packing={packing}"])
        held = step_work.tokens_of(loaded.data, 1, Batch(16, 4, 4), report)
        assert held == (4 * 256, 4 * 4 * tokens)


def test_a_launch_for_cpus_is_planned_on_one(capsys) -> None:
    assert main.main(["plan", str(QUICKSTART), "--accelerate", "cpu_2"]) == 0
    assert "micro-batch 4 x 1 accumulation x 2 processes" in capsys.readouterr().out
    assert main.main(["plan", str(QUICKSTART), "--accelerate", "cpu_2", "--gpu", "h200"]) == 2
    assert "the config is for the CPU, and --gpu plans for a GPU" in capsys.readouterr().err


def test_a_launch_that_is_not_planned_is_refused(large, capsys) -> None:
    asked = ["plan", str(large), "--gpu", "h200", "--accelerate"]
    assert main.main([*asked, "fsdp2_8_offload"]) == 2
    assert "finetune can't plan this launch" in capsys.readouterr().err
    assert main.main([*asked, "zero2_8", "train.effective_batch_size=8"]) == 0
    assert "ZeRO-2" in " ".join(capsys.readouterr().out.split())


def test_a_launch_is_planned_with_as_many_processes_as_it_starts(large, capsys) -> None:
    """A config that leaves their number open is told it; one of a single process takes no more."""
    asked = ["plan", str(large), "train.effective_batch_size=16", "--gpu", "h200", "--accelerate"]
    assert main.main([*asked, "multi_node"]) == 2
    said = capsys.readouterr().err
    assert (
        "the config has no number of processes" in said
        and "num_processes: -1" in said
        and "--gpus 16" in said
    )
    assert main.main([*asked, "multi_node", "--gpus", "16"]) == 0
    assert "DDP:" in capsys.readouterr().out
    assert main.main([*asked, "single_gpu", "--gpus", "8"]) == 2
    assert "the config starts one process" in capsys.readouterr().err
    assert main.main([*asked, "ddp_4", "--gpus", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 x H200" in out and "DDP:" not in out
    if not torch.cuda.is_available():
        assert main.main(["plan", str(QUICKSTART), "--accelerate", "cpu"]) == 0


def test_old_gpus_train_in_fp16_and_never_in_fp8(large) -> None:
    made = planned(large, "model.quantization=auto", gpu="t4")
    assert made.choices["quantization"].value == "fp16" and not made.fits
    with pytest.raises(UserError, match="can't train on an fp8 base model"):
        planned(large, "model.quantization=fp8", gpu="a100-80gb")


@pytest.mark.parametrize(
    ("name", "said"),
    [("h100-80g", "h100-80gb"), ("a100", "--gpu a100-40gb or --gpu a100-80gb"), ("4090", "")],
)
def test_an_unknown_gpu_is_named_with_the_nearest(name: str, said: str, capsys) -> None:
    assert main.main(["plan", str(QUICKSTART), "--gpu", name]) == 2
    text = capsys.readouterr().err
    assert (
        "error: --gpu: the table of GPUs has no such GPU" in text
        and f"found:     {name}" in text
        and said in text
    )


def test_gpus_are_known_by_the_names_that_torch_gives_them() -> None:
    names = {
        "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100-80gb", "NVIDIA H100 PCIe": "h100-pcie",
        "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA L4": "l4",
        "NVIDIA L40S": "l40s", "NVIDIA L40": "l40", "NVIDIA A10G": "a10g", "NVIDIA A10": "a10",
        "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA RTX A6000": "rtx-a6000", "NVIDIA H20": "h20",
        "Tesla T4": "t4", "Tesla V100-SXM2-32GB": "v100-32gb", "NVIDIA GeForce RTX 5090": "rtx5090",
    }  # fmt: skip
    for device, name in names.items():
        assert gpus.of_device(device) is gpus.GPUS[name] is gpus.named(device) is gpus.named(device.lower())
    for device in (
        "NVIDIA GeForce GTX 1080", "NVIDIA T400 4GB", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB",
    ):  # fmt: skip
        assert gpus.of_device(device) is None, device
        with pytest.raises(UserError, match="the table of GPUs has no such GPU"):
            gpus.named(device)
    for name, gpu in gpus.GPUS.items():  # a machine that is planned for is found again by its name
        device = planned_machine.find(name, 1)[0].name
        assert gpus.of_device(device) is gpu, name
        assert gpus.named(f"{device} {gpu.memory_gib:.0f} GiB") is gpu, "as a plan prints it"
    assert gpus.named("rtx 4090") is gpus.named("RTX 4090 24 GiB") is gpus.GPUS["rtx4090"]


def test_the_cpu_is_planned_for_where_there_is_no_gpu(capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main.main(["plan", str(QUICKSTART), "--price-per-hour", "2"]) == 0
    text = capsys.readouterr().out
    assert "1 x CPU" in text and "fits" in text and "one layer, timed now" in text and "cost" in text
    assert main.main(["plan", str(QUICKSTART), "--gpus", "2"]) == 2
    assert "this machine has no GPU, so the plan needs --gpu" in capsys.readouterr().err


def test_packed_attention_is_slower_on_short_documents() -> None:
    step = step_time.Pass(4096, 4096, 1, "bf16", False, 0.0, 0.0, 1, True)
    long, short = (step_time.shipped("NVIDIA H200", "varlen", step._replace(length=n)) for n in (2048, 512))
    assert long and short
    assert long.forward == pytest.approx(292e12) and short.forward == pytest.approx(140e12, rel=0.02)


@pytest.mark.alone
@pytest.mark.parametrize("tokenized", [False, True], ids=("a config alone", "with its tokenizer"))
def test_it_answers_in_five_seconds_without_torch(large, tokenized: bool) -> None:
    given = str(QUICKSTART if tokenized else large)
    command = [sys.executable, "-X", "importtime", "-m", "finetune", "plan", given, "--gpu", "rtx4090"]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert time.monotonic() - begun < 5
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "pydantic" in imported and not imported & {"torch", "transformers"}


def test_the_committed_plans_keep_the_bounds() -> None:
    benchmark = module_of("benchmarks", "plan")
    rows = json.loads(benchmark.RESULTS.read_text())
    assert benchmark.verdict(rows) in (ROOT / "docs" / "explanation" / "performance.md").read_text()
    for what, most, worst in (("seconds", 0.15, 0.25), ("gib", 0.10, 0.15)):
        errors = benchmark.errors(rows, what)
        measured = {name: row for name, row in rows.items() if row[f"measured_{what}"]}
        far = [name for name, row in measured.items() if abs(benchmark.off(row, what)) > worst]
        assert len(errors) >= 60 and not far
        assert sum(error <= most for error in errors) >= 0.95 * len(errors)
    assert [name for name, row in rows.items() if "ran_out" in row] == ["cap-24"], "a plan that did not hold"


def test_what_is_committed_of_the_plans_is_what_they_say() -> None:
    """Each row is planned anew."""
    benchmark = module_of("benchmarks", "plan")
    kept = json.loads(benchmark.RESULTS.read_text())
    assert json.loads(json.dumps(benchmark.compare())) == kept, "python benchmarks/plan.py"
