"""The weights of the loss, from the data to the gradients, next to a plain loop in float64."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.adapters import trainable_parameters
from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data.streaming import BlockSettings, encode_block
from finetune.recipe.schema import Data
from support.in_float64 import step
from support.paths import MODEL, QUICKSTART
from support.runs import metrics, run_checks
from support.weighted_rows import loss_by_hand, write

TIMES = "\N{MULTIPLICATION SIGN}"
AS_IT_WAS = ("train.max_steps=1", "train.optim=sgd", "train.learning_rate=1e-30")  # changes no weight
CASES = {
    "padded": (),
    "flat": ("data.padding_free=true",),
    "packed": ("data.packing=true", "data.max_length=512", "train.effective_batch_size=2"),
}


@pytest.mark.parametrize("loss", ["chunked", "trl"])
@pytest.mark.parametrize("case", CASES)
def test_weighted_loss_of_a_step_is_a_plain_loops(case: str, loss: str, two_layers, tmp_path) -> None:
    """Of eight chats in two or more micro-batches; packed, of two sequences."""
    rows = write(tmp_path / "rows.jsonl")
    data, at_once = f"data.name={rows}", 1 if case == "packed" else 2
    made = step(tmp_path, data, str(two_layers), at_once, more=(*AS_IT_WAS, *CASES[case]), loss=loss)
    model = made.trainer.model
    assert made.trainer.args.gradient_accumulation_steps > 1
    assert len(made.trainer.train_dataset) == (2 if case == "packed" else 8)
    trained = trainable_parameters.trainable(model)
    model.zero_grad()
    wanted = loss_by_hand(model, AutoTokenizer.from_pretrained(MODEL), rows)
    wanted.backward()
    near = 1e-6 if loss == "trl" else 1e-12  # TRL computes in float32
    assert float(made.gradients["loss"]) == pytest.approx(wanted.item(), rel=near)
    for name, parameter in trained.items():
        gradient = made.gradients[f"gradient.{name}"]
        assert float((gradient - parameter.grad).norm()) <= near * float(parameter.grad.norm()), name


def test_a_run_on_weights_evaluates_and_resumes_with_them(train, tmp_path) -> None:
    """The base model's validation loss is a plain loop's, also of the stored validation set."""
    rows = write(tmp_path / "rows.jsonl")
    given = [f"data.name={rows}", f"data.validation={write(tmp_path / 'held.jsonl', 5)}"]
    given += ["data.expect.in_validation=1", "eval.generate=false", "eval.batch_size=2"]
    run = train(*given)
    loss = run.read("eval.json")["base"]["loss"]
    name = run.read("adapter/adapter_config.json")["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    with torch.no_grad():
        wanted = loss_by_hand(model, AutoTokenizer.from_pretrained(MODEL), tmp_path / "held.jsonl")
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    check = run_checks(run)["sum of the loss weights in step 1"]
    assert check["passed"] and check["expected"] == str(round(float(check["actual"])))
    report = run.read("data_report.json")
    assert 0 < report["train"]["loss_weight"] < report["train"]["trained_tokens"]
    assert report["train"]["counts"]["weighted"] == 6
    stored = [json.loads(line) for line in run.read_text("validation.jsonl").splitlines()]
    assert [bool(row.get("weights")) for row in stored] == [True, True, True, False, True]
    (tmp_path / "held.jsonl").unlink()
    assert main.main(["evaluate", str(run.path), "--quiet"]) == 0
    assert run.read("eval.json")["base"]["loss"] == pytest.approx(loss, rel=1e-6)


def test_settings_that_would_ignore_weights_are_refused(two_layers, tmp_path, capsys) -> None:
    rows = write(tmp_path / "rows.jsonl")
    given = [f"data.name={rows}", "data.validation=null", f"model.name={two_layers}"]
    given += ["train.label_smoothing_factor=0.1", "adapter.init_lora_weights=lora_ga"]
    for command in ("check", "train"):
        assert main.main([command, str(QUICKSTART), *given]) == 2
        said = capsys.readouterr().err
        assert "train.label_smoothing_factor: this setting does not support the weights" in said
        assert "adapter.init_lora_weights: this setting does not support the weights" in said


def test_the_data_command_shows_weights(two_layers, tmp_path, capsys) -> None:
    rows, page = write(tmp_path / "rows.jsonl"), tmp_path / "page.html"
    given = [f"data.name={rows}", "data.validation=null", f"model.name={two_layers}"]
    assert main.main(["data", str(QUICKSTART), *given, "--show", "8", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert f"{TIMES}0.5" in said and f"{TIMES}0.75" in said and "sum of loss weights" in said
    assert "6 of 8 examples have weights of the loss between 0 and 1" in said
    assert "in the loss, weight 0.5" in page.read_text() and f"<sup>{TIMES}0.5</sup>" in page.read_text()


def test_a_stream_with_weights_trains_as_prepared_data_does(train, tmp_path) -> None:
    rows = write(tmp_path / "rows.jsonl")
    given = ["data.streaming=true", "data.validation=null", "eval.generate=false", "train.logging_steps=1"]
    given += [
        "train.max_steps=1",
        "train.effective_batch_size=8",
        "data.shuffle_buffer=8",
        f"data.name={rows}",
    ]
    streamed = train(*given, name="streamed")
    prepared = train(*given, "data.streaming=false", name="prepared")
    assert metrics(streamed)[0]["loss"] == pytest.approx(metrics(prepared)[0]["loss"], rel=1e-5)


def test_weights_after_the_first_examples_of_a_stream_are_refused(tmp_path) -> None:
    rows = [json.loads(line) for line in write(tmp_path / "rows.jsonl").read_text().splitlines()]
    batch = {"value": rows, "bad": [[]] * 8, "where": [f"rows.jsonl:{n}" for n in range(1, 9)]}
    batch["source"] = ["rows.jsonl"] * 8
    data, tokenizer = Data(name="rows.jsonl"), AutoTokenizer.from_pretrained(MODEL)
    read, settings = torch.zeros(64, 2, dtype=torch.int64), BlockSettings(0, None, (), has_weights=False)
    with pytest.raises(
        UserError, match="weights of the loss, and the first examples of the stream have none"
    ):
        encode_block(batch, read, data, tokenizer, settings)
