"""Runs that meet a fault: numbers that are not finite, no memory, a full disk."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file

from finetune.checkpointing import checkpoints
from finetune.cli import main
from finetune.core.console import Console
from finetune.core.errors import UserError
from finetune.core.run_checks import RunChecks
from finetune.experiments.runner import rehearsal
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.run_folder.run_folder import RunFolder
from finetune.training import nan_detection
from support import tables
from support.faults import Fault, injected
from support.faulty_runs import FEW, same
from support.paths import MODEL, QUICKSTART, ROOT
from support.printed_commands import assert_commands_run
from support.runs import metrics


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("weight", "trained weights are NaN or Inf"),
        ("input", "the output of base_model.model.model.embed_tokens (micro-batch 1 of 2)"),
        ("nan", "so the cause is gone"),
    ],
)
def test_a_step_that_is_not_finite_ends_the_run_before_its_update(
    fault: str, said: str, train, capsys, small
) -> None:
    with injected(Fault(fault, step=3)):
        run = train(*FEW, "train.save_steps=1", "train.per_device_train_batch_size=4", code=5)
    text = capsys.readouterr().err
    assert "the gradients of step 3 are NaN or Inf" in text and said in text
    last = checkpoints.published(run.checkpoints)[0]
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
    assert nan_detection.sources(rows, batch) == ["a:2", "a:3", "b:1"], "the same tokens stand twice"
    assert nan_detection.sources(rows.to_iterable_dataset(), batch) == []


def test_a_step_may_be_left_out_and_the_schedule_waits(train) -> None:
    with injected(Fault("input", step=2)):
        run = train(*FEW, "train.skip_nonfinite=1", "train.save_steps=1", "train.save_total_limit=null")
    assert "step 2 is skipped" in (run.path / "log.txt").read_text()
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


def test_more_steps_in_a_row_than_allowed_end_the_run(train, capsys) -> None:
    with injected(Fault("nan", step=2), Fault("nan", step=3)):
        train(*FEW, "train.skip_nonfinite=1", code=5)
    assert "after 1 such steps before it" in capsys.readouterr().err


def test_a_run_whose_first_steps_have_no_gradient_ends(train, capsys) -> None:
    with_values = "train.max_steps=6", "train.max_grad_norm=1e-300"
    run = train(*FEW, *with_values, code=5)
    assert "all gradients of the first 3 steps are 0" in capsys.readouterr().err
    assert not list(checkpoints.published(run.checkpoints))


def test_the_first_module_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[1].weight.requires_grad_(False).fill_(math.inf)
    given = torch.ones(1, 2)
    assert nan_detection.first_not_finite(model, lambda: model(given).sum()) == "the output of 1"
    model[1].weight.fill_(1.0)
    assert nan_detection.first_not_finite(model, lambda: model(given).sum()) == ""
    assert nan_detection.first_not_finite(model, lambda: model(given).sum() * math.inf) == (
        "the loss, of outputs that are finite"
    )
    zero = lambda: model(given * 0).sum().abs().sqrt()  # noqa: E731 (an infinite slope)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert "the gradient of" in nan_detection.first_not_finite(model, zero)


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
    found = [nan_detection.spike(losses[max(0, end - 35) : end]) for end in range(1, len(losses) + 1)]
    assert (max(found) > 2.0) == (curve in SPIKES)


def test_a_spike_ends_the_run_where_the_recipe_says_so(monkeypatch) -> None:
    said: list[str] = []
    screen: Any = type("Console", (), {"say": lambda self, *lines: said.extend(lines)})()
    state: Any = type("State", (), {"global_step": 7})()
    for stop_at in (None, 2.0):
        spikes = nan_detection.Spikes(stop_at, screen)
        for loss in [1.0] * 40 + [9.0, 9.0]:
            spikes.on_log(None, state, None, logs={"loss": loss})
        again = nan_detection.Spikes(stop_at, screen)
        again.load_state_dict(spikes.state_dict())
        if stop_at is None:
            again.on_log(None, state, None, logs={"loss": 9.0})
            assert len(said) == 1 and "9.0 times" in said[0]
        else:
            with pytest.raises(UserError, match="median of the previous 32 values"):
                again.on_log(None, state, None, logs={"loss": 9.0})


def test_a_full_disk_leaves_the_last_checkpoint(train, capsys) -> None:
    with injected(Fault("disk", step=3)):
        run = train(*FEW, "train.save_steps=1", code=3)
    assert "No space left on device" in capsys.readouterr().err
    assert checkpoints.published(run.checkpoints)[0].name == "step-2"
    train(*FEW, "train.save_steps=1", "--resume")


@pytest.mark.soak
def test_a_preflight_lives_the_whole_life_of_a_run(small, two_layers, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = [*small, f"model.name={two_layers}", "train.effective_batch_size=8"]
    given += ["eval.generate=false", "eval.forgetting=false"]
    tables.assert_tables_fit(lambda: main.main(["check", str(QUICKSTART), *given, "--rehearse"]))
    said = capsys.readouterr().out
    assert_commands_run(said)
    for phase in (
        "load",
        "resume: save, reopen, evaluate, generate",
        "without a stop: steps",
        "publish --dry-run",
    ):
        assert phase in said
    assert "the resumed run equals the run without a stop, bit for bit" in said and ": finetune train" in said
    assert not list(tmp_path.glob("finetune-*")), "left behind"


def test_a_preflight_evaluates_at_its_end_alone() -> None:
    """Early stopping and what decides on the best weights go with `eval.eval_steps`."""
    given = ["eval.eval_steps=10", "eval.early_stopping_patience=2", "eval.metric_for_best_model=exact_match"]
    asked = loader.load(QUICKSTART, [*given, *rehearsal.LITTLE]).eval
    assert (asked.eval_steps, asked.early_stopping_patience, asked.metric_for_best_model) == (
        None,
        None,
        "loss",
    )


def test_a_preflight_that_fails_says_in_which_phase(small, two_layers, capsys) -> None:
    given = [*small, f"model.name={two_layers}", "train.save_total_limit=1000000000"]
    assert main.main(["check", str(QUICKSTART), *given, "--rehearse"]) == 3
    said = capsys.readouterr().err
    assert "the rehearsal failed in the phase `load`" in said and "no room" in said


def test_a_disk_without_room_for_the_checkpoints_is_found_before_training(train, capsys) -> None:
    train(*FEW, "train.save_total_limit=1000000000", code=3)
    assert "the disk has no room for 1000000001 checkpoints" in capsys.readouterr().err


def test_fp16_ends_where_its_scaler_leaves_out_step_after_step(tmp_path) -> None:
    """Some overflow in a row are how it finds its scale; more are a loss or weights that are not finite."""
    train: Any = SimpleNamespace(skip_nonfinite=2, stop_at_spike=None)
    watcher, _ = nan_detection.callbacks(train, "fp16", RunFolder(tmp_path), Console(quiet=True), RunChecks())
    state, optimizer = SimpleNamespace(global_step=7), SimpleNamespace(step_was_skipped=True)
    logs: dict[str, Any] = {}
    for _ in range(16):
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    watcher.on_step_end(None, state, None, optimizer=SimpleNamespace(step_was_skipped=False))
    for _ in range(nan_detection.HALVINGS + 2):
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    watcher.on_log(None, state, None, logs=logs)
    assert logs == {"skipped_steps": 16 + nan_detection.HALVINGS + 2}
    with pytest.raises(UserError, match="skipped 23 steps in a row") as raised:
        watcher.on_step_end(None, state, None, optimizer=optimizer)
    assert raised.value.code == 5


def test_overflows_of_fp16_s_scaler_are_counted(tmp_path) -> None:
    """By a real scaler, of a gradient that is infinite at its first scale and in step 4: in each line logged,
    over a resume, and in a run check."""
    train: Any = SimpleNamespace(skip_nonfinite=0, stop_at_spike=None)
    checks, screen = RunChecks(), Console(quiet=True)
    watcher, resumed = (
        nan_detection.callbacks(train, "fp16", RunFolder(tmp_path), screen, checks)[0] for _ in range(2)
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
    assert [check.actual for check in checks.entries] == ["2 of 5"]
