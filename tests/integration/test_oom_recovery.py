"""A step that memory has no room for: made again in halves, or ended with advice; the largest batch."""

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from finetune.autoconfig import launch_settings
from finetune.checkpointing import checkpoints
from finetune.hardware import detection
from finetune.planning import planned_machine, planner
from finetune.preflight import allowed_changes
from finetune.recipe import loader
from finetune.recipe.schema import Speed
from finetune.training import batch_search, oom_recovery
from support.faults import Fault, injected
from support.faulty_runs import FEW, same, weights
from support.paths import QUICKSTART
from support.runs import metrics
from support.soak import soak_except


@pytest.mark.parametrize("method", soak_except(["lora"], ["lora", "adalora"]))
def test_no_memory_halves_the_micro_batch_and_repeats_the_step(method: str, train) -> None:
    """Equal bit for bit to a run that had the small micro-batch from the beginning."""
    given = [*FEW, f"adapter.type={method}", "train.save_steps=1"]
    small = train(*given, "train.per_device_train_batch_size=2", name="small")
    with injected(Fault("oom", rows=2)):
        run = train(*given, "train.per_device_train_batch_size=4")
    said = (run.path / "log.txt").read_text()
    assert "step 1 ran out of memory and runs again with a micro-batch size of 2 instead of 4" in said
    (check,) = [r for r in run.read("checks.json") if r["option"] == "micro-batch size"]
    assert (check["expected"], check["actual"]) == ("4", "2")
    assert same(weights(run), weights(small))
    numbers = ("step", "tokens", "learning_rate", "grad_norm")
    assert [[line[k] for k in numbers] for line in metrics(run)] == [
        [line[k] for k in numbers] for line in metrics(small)
    ]
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(small)])
    state = checkpoints.read_json(run.checkpoints / "step-4", "state.json")
    assert "parts" in json.dumps(state["callbacks"]), "a resumed run goes on with the small one"


def test_no_memory_once_is_met_in_the_step_it_happens(train) -> None:
    few = [*FEW, "train.per_device_train_batch_size=4", "adapter.lora_dropout=0"]
    with injected(Fault("oom", step=3)):
        run = train(*few)
    plain = train(*few, name="plain")
    assert [line["loss"] for line in metrics(run)[:2]] == [line["loss"] for line in metrics(plain)[:2]]
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(plain)])


@pytest.mark.soak
def test_packed_rows_are_halved_too_and_a_resumed_run_stays_so(train) -> None:
    few = [*FEW, "train.per_device_train_batch_size=4", "adapter.lora_dropout=0", "data.packing=true"]
    few += ["speed.activation_checkpointing=none"]
    few += ["train.effective_batch_size=4", "data.max_length=256"]
    plain = train(*few, name="plain")
    with injected(Fault("oom", tokens=2 * 256)):
        train(*few, "--until=2", code=75)
        run = train(*few, "--resume")
    assert (run.path / "log.txt").read_text().count("out of memory") == 1, "the second process knows"
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(plain)])


@pytest.mark.parametrize(("rows", "parts", "fewer"), [(8, 1, 4), (5, 1, 1), (6, 2, 2), (9, 2, 3)])
def test_fewer_rows_are_advised_that_a_step_can_be_split_into(rows: int, parts: int, fewer: int) -> None:
    """5 rows, 40 in a step on 8 processes: 2 would be refused."""
    made = oom_recovery.MicroBatches(rows)
    made.parts = parts
    assert f"per_device_train_batch_size={fewer} (" in str(made.too_large(1, "out of memory"))


def test_one_row_that_is_too_much_ends_the_run_with_advice(train, monkeypatch, capsys, tmp_path) -> None:
    """What it would need, by `finetune plan`; what takes the memory; three ways to take less."""
    monkeypatch.setattr(oom_recovery.MicroBatches, "rows", 1, raising=False)
    stated = ["train.per_device_train_batch_size=1", "speed.activation_checkpointing=none"]
    with injected(Fault("oom", step=1), Fault("oom", rows=1)):
        run = train(*FEW, *stated, code=5)
    said = capsys.readouterr().err
    assert "step 1 ran out of memory with a micro-batch size of 1" in said
    assert "memory in use, GiB: frozen weights 0.0" in said and "trainable weights 0.0" in said
    (fix,) = re.findall(r"help: +(.*)", said)
    changes = "speed.activation_checkpointing=full, or model.quantization=nf4, or data.max_length=128"
    assert fix == f"{changes} (`finetune plan RECIPE` shows the memory of each)"
    ((needed, rows),) = re.findall(r"by finetune plan: (\S+) GiB for (.*)", said)
    made = planner.make(loader.load(run.recipe), *planned_machine.find(None, None))
    assert rows == "a micro-batch of 1 x 256 tokens" and made.tokens == 256
    assert float(needed) == pytest.approx(sum(made.phases["step"].values()), rel=0.1)


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", "ia3", "full"])
def test_there_are_three_ways_to_take_less_memory(kind: str) -> None:
    for checkpointing in ("auto", "full"):
        assert (
            len(
                oom_recovery.fixes(
                    Speed(activation_checkpointing=checkpointing), "auto", kind, 256, lambda change: True
                )
            )
            >= 3
        )


def test_what_moves_less_to_the_cpu_is_not_advised(monkeypatch) -> None:
    monkeypatch.setattr(oom_recovery, "_gpu", lambda: True)
    for asked, move in (("none", "all"), ("activations", "all"), ("all", "")):
        found = oom_recovery.fixes(Speed(offload=asked), "auto", "lora", 256, lambda change: True)
        assert [one for one in found if "offload" in one] == [f"speed.offload={move}"] * bool(move)


TE = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
}


H100 = detection.Hardware("cuda", "NVIDIA H100 80GB HBM3", 1, (9, 0), 79.6, 16)


@pytest.mark.parametrize(
    ("given", "launched", "processes", "first"),
    [
        (["adapter.type=lora"], {}, 1, ["speed.activation_checkpointing=full", "model.quantization=nf4"]),
        (
            ["adapter.type=full"],
            {},
            1,
            ["speed.activation_checkpointing=full", "data.max_length=128", "speed.offload=all"],
        ),
        (["adapter.type=full"], TE, 1, ["data.max_length=128", "several GPUs"]),
        (
            ["adapter.type=full"],
            {},
            2,
            ["speed.activation_checkpointing=full", "data.max_length=128", "speed.offload=activ"],
        ),
        (
            ["adapter.type=adalora"],
            {},
            1,
            ["speed.activation_checkpointing=full", "data.max_length=128", "speed.offload=act"],
        ),
        (
            ["speed.compile=reduce-overhead"],
            {},
            1,
            ["model.quantization=nf4", "data.max_length=128", "a smaller"],
        ),
    ],
)
def test_advice_is_what_the_run_would_not_refuse(given, launched, processes, first, monkeypatch) -> None:
    """TransformerEngine runs no layer twice, AdaLoRA's weights stay on the GPU, CUDA graphs run once."""
    monkeypatch.setattr(oom_recovery, "_gpu", lambda: True)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    made = loader.load(QUICKSTART, [*given, "data.max_length=256"])
    launch = launch_settings.Launch("here", processes, 0, "bf16", "hardware", "")
    setup = SimpleNamespace(hardware=H100, launch=launch)
    allowed = partial(allowed_changes.allows, made, setup)
    found = oom_recovery.fixes(
        made.speed, made.model.quantization, made.adapter.type, made.data.max_length, allowed
    )
    assert all(text.startswith(start) for text, start in zip(found, first, strict=False)), found


def test_graphs_are_the_first_advice() -> None:
    """They have memory of their own, and without them a step is slower at most."""
    graphs, without = (
        oom_recovery.fixes(Speed(), "auto", "lora", 256, bool, graphs=given) for given in (True, False)
    )
    assert graphs == ["speed.compile=default", *without]


def test_other_errors_are_never_repeated(train, capsys) -> None:
    with injected(Fault("raise", step=2)):
        train(*FEW, code=5)
    assert capsys.readouterr().err.count("Injected: in step 2") == 1


def test_flattened_batches_are_cut_between_documents() -> None:
    lengths = [2, 3, 3, 4, 1]
    borders = torch.tensor([0, 2, 5, 8, 12, 13], dtype=torch.int32)
    ids = torch.arange(13)[None]
    batch = {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": 4,
        "max_length_k": 4,
        "num_labels": 0,
        "num_tokens": 0,
    }
    parts = list(oom_recovery.documents_apart(batch, 2))
    assert [p["input_ids"].tolist()[0] for p in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]
    assert [p["cu_seq_lens_q"].tolist() for p in parts] == [[0, 2, 5], [0, 3, 7], [0, 1]]
    assert [p["max_length_q"] for p in parts] == [3, 4, 1]
    assert sum(p["num_tokens"] for p in parts) == 13


def test_the_largest_batch_that_fits_is_found_and_leaves_no_trace(train) -> None:
    """4 rows fit and 8 do not; the run is the one that says 4, bit for bit, also where it goes on."""
    told = train(*FEW, "train.per_device_train_batch_size=4", name="told")
    found = [*FEW, "train.per_device_train_batch_size=auto"]
    with injected(Fault("oom", rows=4)):
        run = train(*found, "--until=2", code=75)
    (check,) = [r for r in run.read("checks.json") if r["option"] == "train.per_device_train_batch_size"]
    assert check["actual"] == "4" and "8: inf" in check["how"]
    run = train(*found, "--resume")
    assert "per_device_train_batch_size: 4" in (run.path / "recipe.resolved.yaml").read_text()
    assert same(weights(run), weights(told))


def test_not_even_one_row_fits(train, monkeypatch, capsys) -> None:
    monkeypatch.setattr(batch_search, "MARGIN", 0.01)
    train(*FEW, "train.per_device_train_batch_size=auto", code=5)
    assert "not even one of the longest sequences" in capsys.readouterr().err
    train(*FEW, "train.per_device_train_batch_size=auto", "data.streaming=true", name="other", code=2)
    assert "a stream does not know them" in capsys.readouterr().err
