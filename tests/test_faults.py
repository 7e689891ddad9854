"""Runs that meet a fault: numbers that are not finite, no memory, a full disk. FINETUNE_FAULT makes them."""

import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from conftest import MODEL, QUICKSTART, ROOT, metrics
from safetensors.torch import load_file

from finetune import batch_search, check, checkpoint, cli, faults, hardware, nonfinite, plan, recipe, rescue
from finetune.errors import UserError
from finetune.model import load_tokenizer
from finetune.receipts import Ledger
from finetune.run_folder import RunFolder
from finetune.screen import Screen
from finetune.sections import Model, Speed

FEW = ["train.max_steps=4", "adapter.lora_dropout=0.1", "train.effective_batch_size=8"]


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.adapter / "adapter_model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("step:5:explode", "not a fault"), ("step:x:kill", "not a number"), ("stop:5:kill", "not a fault")],
)
def test_a_fault_that_can_t_be_read_is_said(text: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        faults.planned({faults.VARIABLE: text})


def test_faults_are_of_one_rank_and_one_life() -> None:
    given = {faults.VARIABLE: "step:2:rank:1:kill,step:3:life:1:nan"}
    assert faults.planned({}) == [] == faults.planned(given)
    assert faults.planned({**given, "RANK": "1"}) == [faults.Fault("kill", 2, 1)]
    assert faults.planned({**given, "TORCHELASTIC_RESTART_COUNT": "1"}) == [faults.Fault("nan", 3, life=1)]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("weight", "trained weights are not finite themselves"),
        ("input", "the output of base_model.model.model.embed_tokens (micro-batch 1 of 2)"),
        ("nan", "what was not has passed"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_before_its_update(
    fault: str, said: str, train, monkeypatch, capsys, small
) -> None:
    monkeypatch.setenv(faults.VARIABLE, f"step:3:{fault}")
    run = train(*FEW, "train.save_steps=1", "train.per_device_train_batch_size=4", code=5)
    text = capsys.readouterr().err
    assert "gradients of step 3 are not finite" in text and said in text
    last = checkpoint.published(run.checkpoints)[0]
    assert last.name == "step-2"
    assert all(t.isfinite().all() for t in load_file(last / "weights.safetensors").values())
    place = run.path / "nonfinite-step-3"
    batches = load_file(place / "batches-rank0.safetensors")
    assert batches["input_ids.0"].shape == batches["labels.0"].shape
    told = json.loads((place / "finding.json").read_text())
    assert said in told["first_not_finite"][0]
    assert [line["step"] for line in metrics(run)] == [1, 2]
    rows = [row for batch in told["rows"]["rank 0"] for row in batch]
    lines = Path(small[0].partition("=")[2]).read_text().splitlines()
    asked = [json.loads(lines[int(row.rpartition(":")[2]) - 1])["messages"][0]["content"] for row in rows]
    shown = load_tokenizer(Model(name=str(MODEL))).batch_decode(
        [*batches["input_ids.0"], *batches["input_ids.1"]]
    )
    assert len(rows) == 8 == sum(any(text in row for row in shown) for text in asked)


def test_rows_of_a_flattened_batch_are_found_by_their_tokens() -> None:
    columns = {
        "input_ids": [[1, 2, 3, 4, 5], [6, 7], [3, 4, 5, 6]],
        "seq_lengths": [[2, 3], [2], [3, 1]],
        "where": [["a:1", "a:2"], ["a:3"], ["b:1", "b:2"]],
    }
    batch = {"input_ids": torch.tensor([[3, 4, 5, 6, 7]]), "cu_seq_lens_q": torch.tensor([0, 3, 5])}
    rows: Any = datasets.Dataset.from_dict(columns)
    assert nonfinite.sources(rows, batch) == ["a:2", "a:3", "b:1"], "the same tokens stand twice"
    assert nonfinite.sources(rows.to_iterable_dataset(), batch) == []


def test_a_step_may_be_left_out_and_the_schedule_waits(train, monkeypatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "step:2:input")
    run = train(*FEW, "train.skip_nonfinite=1", "train.save_steps=1", "train.save_total_limit=null")
    assert "step 2 is left out" in (run.path / "log.txt").read_text()
    lines = metrics(run)
    assert [line["skipped_steps"] for line in lines] == [0, 1, 1, 1]
    nan = [[str(line[key]).lower() == "nan" for key in ("grad_norm", "loss")] for line in lines]
    assert nan == [[False] * 2, [True] * 2, [False] * 2, [False] * 2], "there alone, and no number there"
    kept = {n: load_file(run.checkpoints / f"step-{n}" / "weights.safetensors") for n in (1, 2, 3)}
    assert same(kept[1], kept[2]) and not same(kept[2], kept[3])
    rates = [line["learning_rate"] for line in lines]
    assert rates[1] == rates[2], "the schedule waits"
    moments = load_file(run.checkpoints / "step-4" / "optimizer.safetensors")
    assert {int(v) for k, v in moments.items() if v.numel() == 1} == {3}, "the optimizer's own count"


def test_more_steps_in_a_row_than_allowed_end_the_run(train, monkeypatch, capsys) -> None:
    monkeypatch.setenv(faults.VARIABLE, "step:2:nan,step:3:nan")
    train(*FEW, "train.skip_nonfinite=1", code=5)
    assert "nor were those of 1 steps before it" in capsys.readouterr().err


def test_the_first_module_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[1].weight.requires_grad_(False).fill_(math.inf)
    given = torch.ones(1, 2)
    assert nonfinite.first_not_finite(model, lambda: model(given).sum()) == "the output of 1"
    model[1].weight.fill_(1.0)
    assert nonfinite.first_not_finite(model, lambda: model(given).sum()) == ""
    assert nonfinite.first_not_finite(model, lambda: model(given).sum() * math.inf) == (
        "the loss, of outputs that are finite"
    )
    zero = lambda: model(given * 0).sum().abs().sqrt()  # noqa: E731 (an infinite slope)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert "the gradient of" in nonfinite.first_not_finite(model, zero)


HEALTHY = {
    "falling": [4 * math.exp(-i / 40) + 0.5 for i in range(200)],
    "noisy": [1 + 0.5 * math.sin(i * 12.9898) for i in range(200)],
    "hard batches": [1.0 if i % 9 else 3.0 for i in range(200)],
    "steps": [2.0 if i < 100 else 1.0 for i in range(200)],
    "steps left out": [math.nan if i % 9 == 8 else 1 + 0.5 * math.sin(i * 12.9898) for i in range(200)],
    **json.loads((ROOT / "tests" / "golden" / "healthy.json").read_text()),  # recorded
    "two epochs": [1.5 - 0.5 * (i >= 60) + 0.1 * math.cos(i) for i in range(200)],
}
SPIKES = {
    "jump": [1.0] * 60 + [9.0] * 4,
    "slow climb": [1.0] * 60 + [1.0 + i for i in range(8)],
    "after noise": [1 + 0.3 * math.sin(i) for i in range(60)] + [4.0] * 4,
    "not a number": [1.0] * 60 + [math.nan] * 4,
    "falling, then up": [3 * math.exp(-i / 20) + 0.2 for i in range(60)] + [3.0] * 4,
}


@pytest.mark.parametrize("curve", [*HEALTHY, *SPIKES])
def test_spikes_are_told_from_healthy_curves(curve: str) -> None:
    losses = {**HEALTHY, **SPIKES}[curve]
    found = [nonfinite.spike(losses[max(0, end - 35) : end]) for end in range(1, len(losses) + 1)]
    assert (max(found) > 2.0) == (curve in SPIKES)


def test_a_spike_ends_the_run_where_the_recipe_says_so(monkeypatch) -> None:
    said: list[str] = []
    screen: Any = type("Screen", (), {"say": lambda self, *lines: said.extend(lines)})()
    state: Any = type("State", (), {"global_step": 7})()
    for stop_at in (None, 2.0):
        spikes = nonfinite.Spikes(stop_at, screen)
        for loss in [1.0] * 40 + [9.0, 9.0]:
            spikes.on_log(None, state, None, logs={"loss": loss})
        again = nonfinite.Spikes(stop_at, screen)
        again.load_state_dict(spikes.state_dict())
        if stop_at is None:
            again.on_log(None, state, None, logs={"loss": 9.0})
            assert len(said) == 1 and "9.0 times" in said[0]
        else:
            with pytest.raises(UserError, match="median of the 32 before"):
                again.on_log(None, state, None, logs={"loss": 9.0})


@pytest.mark.parametrize("method", ["lora", "adalora"])
def test_no_memory_halves_the_micro_batch_and_repeats_the_step(method: str, train, monkeypatch) -> None:
    """Equal bit for bit to a run that had the small micro-batch from the beginning."""
    given = [*FEW, f"adapter.type={method}", "train.save_steps=1"]
    small = train(*given, "train.per_device_train_batch_size=2", name="small")
    monkeypatch.setenv(faults.VARIABLE, "rows:2:oom")
    run = train(*given, "train.per_device_train_batch_size=4")
    said = (run.path / "log.txt").read_text()
    assert "out of memory in step 1: again, with 2 rows at once in place of 4" in said
    (receipt,) = [r for r in run.read("receipts.json") if r["option"] == "rows at once"]
    assert (receipt["asked"], receipt["got"]) == ("4", "2")
    assert same(weights(run), weights(small))
    numbers = ("step", "tokens", "learning_rate", "grad_norm")
    assert [[line[k] for k in numbers] for line in metrics(run)] == [
        [line[k] for k in numbers] for line in metrics(small)
    ]
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(small)])
    state = checkpoint.read_json(run.checkpoints / "step-4", "state.json")
    assert "parts" in json.dumps(state["callbacks"]), "a resumed run goes on with the small one"


def test_no_memory_once_is_met_in_the_step_it_happens(train, monkeypatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "step:3:oom")
    few = [*FEW, "train.per_device_train_batch_size=4", "adapter.lora_dropout=0"]
    run = train(*few)
    monkeypatch.delenv(faults.VARIABLE)
    plain = train(*few, name="plain")
    assert [line["loss"] for line in metrics(run)[:2]] == [line["loss"] for line in metrics(plain)[:2]]
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(plain)])


def test_packed_rows_are_halved_too_and_a_resumed_run_stays_so(train, monkeypatch) -> None:
    few = [*FEW, "train.per_device_train_batch_size=4", "adapter.lora_dropout=0", "data.packing=true"]
    few += ["train.effective_batch_size=4", "data.max_length=256"]
    plain = train(*few, name="plain")
    monkeypatch.setenv(faults.VARIABLE, "rows:2:oom")
    train(*few, "--until=2", code=75)
    run = train(*few, "--resume")
    assert (run.path / "log.txt").read_text().count("out of memory") == 1, "the second process knows"
    assert [line["loss"] for line in metrics(run)] == pytest.approx([line["loss"] for line in metrics(plain)])


@pytest.mark.parametrize(("rows", "parts", "fewer"), [(8, 1, 4), (5, 1, 1), (6, 2, 2), (9, 2, 3)])
def test_fewer_rows_are_advised_that_a_step_can_be_split_into(rows: int, parts: int, fewer: int) -> None:
    """5 rows, 40 in a step on 8 processes: 2 would be refused."""
    made = rescue.MicroBatches(rows)
    made.parts = parts
    assert f"per_device_train_batch_size={fewer};" in str(made.too_large(1, "out of memory"))


def test_one_row_that_is_too_much_ends_the_run_with_advice(train, monkeypatch, capsys, tmp_path) -> None:
    """What it would need, by `finetune plan`; what takes the memory; three ways to take less."""
    monkeypatch.setenv(faults.VARIABLE, "rows:0:step:1:oom,rows:1:oom")
    monkeypatch.setattr(rescue.MicroBatches, "rows", 1, raising=False)
    run = train(*FEW, "train.per_device_train_batch_size=1", code=5)
    said = capsys.readouterr().err
    assert "out of memory in step 1, with one row at once" in said
    assert "in use, GiB: the base's weights 0.0" in said and "what trains 0.0" in said
    (fix,) = re.findall(r"try: +(.*)", said)
    assert (
        fix
        == "speed.recompute=all; or speed.base=nf4; or data.max_length=128; what each gives: finetune plan"
    )
    ((needed, rows),) = re.findall(r"by finetune plan: (\S+) GiB for (.*)", said)
    made = plan.make(recipe.load(run.recipe), *plan.planned_machine(None, None))
    assert rows == "one row of 256 tokens" and made.tokens == 256
    assert float(needed) == pytest.approx(sum(made.phases["step"].values()), rel=0.1)


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", "ia3", "full"])
def test_there_are_three_ways_to_take_less_memory(kind: str) -> None:
    for recompute in ("auto", "all"):
        assert len(rescue.fixes(Speed(recompute=recompute), kind, 256, lambda change: True)) >= 3


def test_what_moves_less_to_the_cpu_is_not_advised(monkeypatch) -> None:
    monkeypatch.setattr(rescue, "_gpu", lambda: True)
    for asked, move in (("none", "all"), ("activations", "all"), ("all", "")):
        found = rescue.fixes(Speed(offload=asked), "lora", 256, lambda change: True)
        assert [one for one in found if "offload" in one] == [f"speed.offload={move}"] * bool(move)


TE = {
    "ACCELERATE_MIXED_PRECISION": "fp8",
    "ACCELERATE_FP8_BACKEND": "TE",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "max",
}
H100 = hardware.Hardware("cuda", "NVIDIA H100 80GB HBM3", 1, (9, 0), 79.6, 16)


@pytest.mark.parametrize(
    ("given", "launched", "processes", "first"),
    [
        (["adapter.type=lora"], {}, 1, ["speed.recompute=all", "speed.base=nf4"]),
        (["adapter.type=full"], {}, 1, ["speed.recompute=all", "data.max_length=128", "speed.offload=all"]),
        (["adapter.type=full"], TE, 1, ["data.max_length=128", "several GPUs"]),
        (["adapter.type=full"], {}, 2, ["speed.recompute=all", "data.max_length=128", "speed.offload=activ"]),
        (
            ["adapter.type=adalora"],
            {},
            1,
            ["speed.recompute=all", "data.max_length=128", "speed.offload=act"],
        ),
        (["speed.compile=reduce-overhead"], {}, 1, ["speed.base=nf4", "data.max_length=128", "a smaller"]),
    ],
)
def test_advice_is_what_the_run_would_not_refuse(given, launched, processes, first, monkeypatch) -> None:
    """TransformerEngine runs no layer twice, AdaLoRA's weights stay on the GPU, CUDA graphs run once."""
    monkeypatch.setattr(rescue, "_gpu", lambda: True)
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    made = recipe.load(QUICKSTART, [*given, "data.max_length=256"])
    launch = hardware.Launch("here", processes, 0, "bf16", "hardware", "")
    setup = SimpleNamespace(hardware=H100, launch=launch)
    allowed = partial(check.allows, made, setup)
    found = rescue.fixes(made.speed, made.adapter.type, made.data.max_length, allowed)
    assert all(text.startswith(start) for text, start in zip(found, first, strict=False)), found


def test_other_errors_are_never_repeated(train, monkeypatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "step:2:raise")
    with pytest.raises(faults.Injected):
        train(*FEW, "--debug")


def test_a_full_disk_leaves_the_last_checkpoint(train, monkeypatch, capsys) -> None:
    monkeypatch.setenv(faults.VARIABLE, "step:3:disk")
    run = train(*FEW, "train.save_steps=1", code=3)
    assert "No space left on device" in capsys.readouterr().err
    assert checkpoint.published(run.checkpoints)[0].name == "step-2"
    monkeypatch.delenv(faults.VARIABLE)
    train(*FEW, "train.save_steps=1", "--resume")


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
    parts = list(rescue.documents_apart(batch, 2))
    assert [p["input_ids"].tolist()[0] for p in parts] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11], [12]]
    assert [p["cu_seq_lens_q"].tolist() for p in parts] == [[0, 2, 5], [0, 3, 7], [0, 1]]
    assert [p["max_length_q"] for p in parts] == [3, 4, 1]
    assert sum(p["num_tokens"] for p in parts) == 13


def test_the_largest_batch_that_fits_is_found_and_leaves_no_trace(train, monkeypatch) -> None:
    """4 rows fit and 8 do not; the run is the one that says 4, bit for bit, also where it goes on."""
    told = train(*FEW, "train.per_device_train_batch_size=4", name="told")
    monkeypatch.setenv(faults.VARIABLE, "rows:4:oom")
    found = [*FEW, "train.per_device_train_batch_size=auto"]
    run = train(*found, "--until=2", code=75)
    (receipt,) = [r for r in run.read("receipts.json") if r["option"] == "train.per_device_train_batch_size"]
    assert receipt["got"] == "4" and "8: inf" in receipt["how"]
    run = train(*found, "--resume")
    assert "per_device_train_batch_size: 4" in (run.path / "recipe.resolved.yaml").read_text()
    assert same(weights(run), weights(told))


def test_not_even_one_row_fits(train, monkeypatch, capsys) -> None:
    monkeypatch.setattr(batch_search, "MARGIN", 0.01)
    train(*FEW, "train.per_device_train_batch_size=auto", code=5)
    assert "not even one of the longest rows" in capsys.readouterr().err
    train(*FEW, "train.per_device_train_batch_size=auto", "data.streaming=true", name="other", code=2)
    assert "streamed data" in capsys.readouterr().err


def test_a_preflight_lives_the_whole_life_of_a_run(small, two_layers, capsys) -> None:
    given = [*small, f"model.name={two_layers}", "train.effective_batch_size=8", "eval.answers=false"]
    assert cli.main(["check", str(QUICKSTART), *given, "--preflight"]) == 0
    said = capsys.readouterr().out
    for phase in ("load", "resume: save, reopen, evaluate, generate", "straight: steps", "publish --dry-run"):
        assert phase in said
    assert "parts, not a bit differs" in said and "next: finetune train" in said


def test_a_preflight_that_fails_says_in_which_phase(small, two_layers, capsys) -> None:
    given = [*small, f"model.name={two_layers}", "train.save_total_limit=1000000000"]
    assert cli.main(["check", str(QUICKSTART), *given, "--preflight"]) == 3
    said = capsys.readouterr().err
    assert "the preflight ends in: load" in said and "no room" in said


def test_a_disk_without_room_for_the_checkpoints_is_found_before_training(train, capsys) -> None:
    train(*FEW, "train.save_total_limit=1000000000", code=3)
    assert "no room for 1000000001 checkpoints" in capsys.readouterr().err


def test_fp16_ends_where_its_scaler_leaves_out_step_after_step(tmp_path) -> None:
    """Some overflow in a row are how it finds its scale; more are a loss or weights that are not finite."""
    train: Any = SimpleNamespace(skip_nonfinite=2, stop_at_spike=None)
    watcher, _ = nonfinite.watchers(train, "fp16", RunFolder(tmp_path), Screen(quiet=True), Ledger())
    state, optimizer = SimpleNamespace(global_step=7), SimpleNamespace(step_was_skipped=True)
    logs: dict[str, Any] = {}
    for _ in range(16):
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    watcher.on_step_end(None, state, None, optimizer=SimpleNamespace(step_was_skipped=False))
    for _ in range(nonfinite.HALVINGS + 2):
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    watcher.on_log(None, state, None, logs=logs)
    assert logs == {"skipped_steps": 16 + nonfinite.HALVINGS + 2}
    with pytest.raises(UserError, match="left out 23 steps in a row") as raised:
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    assert raised.value.code == 5


def test_overflows_of_fp16_s_scaler_are_counted(tmp_path) -> None:
    """By a real scaler, of a gradient that is infinite at its first scale and in step 4: in each line logged,
    over a resume, and in a receipt."""
    train: Any = SimpleNamespace(skip_nonfinite=0, stop_at_spike=None)
    ledger, screen = Ledger(), Screen(quiet=True)
    watcher, resumed = (
        nonfinite.watchers(train, "fp16", RunFolder(tmp_path), screen, ledger)[0] for _ in range(2)
    )
    Accelerator(cpu=True)  # whose state the optimizer asks for
    weight, scaler = torch.nn.Parameter(torch.ones(())), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.1), scaler=scaler)
    counts, state = [], SimpleNamespace(global_step=0)
    for step in range(1, 6):
        state.global_step = step
        scaler.scale(weight * (math.inf if step == 4 else 2.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        watcher.on_step_end(None, state, None, optimizer=optimizer)
        watcher.on_log(None, state, None, logs=(logs := {}))
        counts.append(logs["skipped_steps"])
    assert counts == [1, 1, 1, 2, 2] and weight.item() == pytest.approx(0.4)
    resumed.load_state_dict(watcher.state_dict())
    resumed.on_train_end(None, state, None)
    assert [receipt.got for receipt in ledger.receipts] == ["2 of 5"]
