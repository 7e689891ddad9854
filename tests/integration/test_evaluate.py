"""`finetune evaluate`: verdicts, evaluation in training, runs that were moved. Its tasks: test_tasks.py."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from finetune.cli import main
from finetune.evaluation import reopen, scoring, tasks, verdicts
from finetune.models import token_limits
from finetune.recipe import loader
from finetune.recipe.schema import Eval
from finetune.reporting import terminal
from finetune.run_folder import comparability
from finetune.run_folder.run_folder import RunFolder
from support.paths import DATA, MODEL, ROOT
from support.runs import metrics, run_checks
from support.small_tasks import CHOICE, QUESTIONS, write_task


def test_noise_is_worse_and_an_untrained_adapter_the_same(train, two_layers, tmp_path, capsys) -> None:
    from peft import LoraConfig, get_peft_model

    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()[:96]]
    for index, row in enumerate(rows):
        row["messages"][-1]["content"] = f"{index * 7919 % 10007:x} zqx vjk"
    noise = tmp_path / "noise.jsonl"
    noise.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    few = tmp_path / "few.jsonl"
    few.write_text("".join(f"{line}\n" for line in (DATA / "test.jsonl").read_text().splitlines()[:30]))
    asked = [f"data.name={noise}", f"data.validation={few}", "train.max_steps=12", "train.learning_rate=1e-2"]
    run = train(*asked, "eval.samples=2")
    worse = run.read("eval.json")
    assert worse["verdict"]["word"] == "worse" and worse["difference"]["loss"]["low"] > 0
    assert "Worse than the base model" in (run.path / "log.txt").read_text()
    losses = [row["tuned_loss"] for row in worse["worst"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 20 and len(worse["samples"]) == 2
    assert worse["worst"][0]["where"].rpartition(":")[2].isdigit()

    untrained = get_peft_model(reopen.open_base(loader.load(run.recipe)), LoraConfig(r=4))
    untrained.save_pretrained(str(run.adapter))
    (run.path / "weights.json").unlink()
    assert main.main(["evaluate", str(run.path), "--quiet"]) == 0
    same = run.read("eval.json")
    assert same["verdict"]["word"] == verdicts.NO_DIFFERENCE and same["difference"]["loss"]["value"] == 0.0
    assert same["difference"]["loss"]["verdict"] == verdicts.NEGLIGIBLE
    assert "with 30 examples, a difference below" in same["verdict"]["why"]


def test_what_is_over_1_is_no_share() -> None:
    """Some tasks give f1 from 0 to 100."""
    change = {"f1": {"low": 0.1, "value": 0.7, "high": 1.2, "verdict": "better"}}
    task = {
        "base": {"f1": 84.6},
        "tuned": {"f1": 85.3},
        "difference": change,
        "main": "f1",
        "forgetting": False,
    }
    nothing: dict[str, Any] = {"difference": {}}
    found = verdicts.verdict({**nothing, "tasks": {"squad": task}})
    assert found["why"] == "squad f1 84.6 -> 85.3 (better)"
    row = terminal._score_row("squad f1", "f1", task)
    assert row[1:4] == ("84.6", "85.3", "+0.7 (+0.1 to +1.2)")


def test_too_few_rows_are_not_called_the_same(train, two_layers, tmp_path) -> None:
    """A handful may well differ by chance: that nothing is known is said, not that nothing changed."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join((DATA / "test.jsonl").read_text().splitlines()[:3]) + "\n")
    run = train(f"model.name={two_layers}", f"data.validation={rows}", "train.max_steps=2", "eval.samples=0")
    found = run.read("eval.json")
    assert found["difference"]["loss"]["verdict"] == verdicts.TOO_FEW
    assert found["verdict"]["word"] == "unknown"
    assert "(too few examples: 3; a test needs 20); use a larger validation set" in found["verdict"]["why"]
    assert "Not enough data to compare with the base model" in (run.path / "report.html").read_text()


def test_sources_are_told_apart(train, two_layers, tmp_path) -> None:
    names = []
    for name in ("one", "two"):
        lines = (DATA / "train.jsonl").read_text().splitlines()
        part = lines[:80] if name == "one" else lines[80:160]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n")
        names.append(str(tmp_path / f"{name}.jsonl"))
    asked = ["data.validation_fraction=0.15", f"data.name={json.dumps(names)}"]
    run = train(f"model.name={two_layers}", *asked, "data.validation=null")
    found = run.read("eval.json")
    assert [source["source"] for source in found["sources"]] == names
    total = sum(source["rows"] for source in found["sources"])
    assert total == found["settings"]["rows"] > 12


def test_a_run_can_be_evaluated_where_only_its_folder_and_its_base_are(
    train, two_layers, tmp_path, capsys, monkeypatch
) -> None:
    """Another place for the run and for the base, and no data at all."""
    base, data = tmp_path / "base", tmp_path / "here"
    shutil.copytree(two_layers, base)
    data.mkdir()
    for name, rows in (("train", 96), ("test", 12)):
        lines = (DATA / f"{name}.jsonl").read_text().splitlines()[:rows]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    task = write_task(data, "choice", QUESTIONS, CHOICE)
    given = [f"data.name={data / 'train.jsonl'}", f"data.validation={data / 'test.jsonl'}"]
    run = train(f"model.name={base}", *given, f"eval.tasks=[{task}]")
    before = run.read("eval.json")
    moved = RunFolder(tmp_path / "moved" / "away")
    moved.path.parent.mkdir()
    shutil.move(run.path, moved.path)
    shutil.rmtree(data)
    base.rename(tmp_path / "base2")
    with monkeypatch.context() as patch:  # said before anything is loaded
        patch.setattr("os.access", lambda path, mode: False)
        given = [f"model.name={tmp_path / 'base2'}", "eval.tasks=[]"]
        assert main.main(["evaluate", str(moved.path), *given, "--quiet"]) == 2
        assert "can't write to the run folder" in capsys.readouterr().err
    assert main.main(["evaluate", str(moved.path), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "model.name" in said and "add eval.tasks=[PATH] to the command, or eval.tasks=[]" in said
    here = [f"model.name={tmp_path / 'base2'}", "eval.tasks=[]"]
    assert main.main(["evaluate", str(moved.path), *here, "--quiet"]) == 0
    assert moved.read("eval.json")["tuned"] == before["tuned"]
    assert moved.read("eval.json")["base"] == before["base"]
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join((DATA / "test.jsonl").read_text().splitlines()[20:30]) + "\n")
    asked = [*here, f"data.validation={other}"]
    assert main.main(["evaluate", str(moved.path), *asked]) == 0
    said = capsys.readouterr().out
    assert "is not the validation set of the run" in said
    assert all(
        f"{which} model: loss and answers of 10 validation examples ..." in said
        for which in ("fine-tuned", "base")
    )
    assert moved.read("eval.json")["settings"]["rows"] == 12  # what the run held out stays its result
    assert moved.read("eval.other.json")["settings"]["rows"] == 10


@pytest.mark.soak
def test_a_base_elsewhere_is_the_run_s_and_another_is_not(train, two_layers, tmp_path) -> None:
    """Its folder is not what it is: its name, its storage and its validation loss are."""
    from safetensors.torch import load_file, save_file

    task = write_task(tmp_path, "choice", QUESTIONS, CHOICE)
    run = train(f"model.name={two_layers}", f"eval.tasks=[{task}]", "eval.generate=false", "eval.limit=2")
    before = RunFolder(shutil.copytree(run.path, tmp_path / "before"))
    base = shutil.copytree(two_layers, tmp_path / "elsewhere" / Path(two_layers).name)
    asked = ["evaluate", str(run.path), f"model.name={base}", "--quiet"]
    assert main.main(asked) == 0 and comparability.obstacles(before, run) == []
    content = run.read("eval.json")
    content["settings"]["rows"] = 5
    run.write("eval.json", content)
    assert comparability.obstacles(before, run) == ["evaluation rows: 3 and 5"]
    asked.append("eval.tasks=[]")
    content["settings"]["storage"] = "bf16"  # as by another machine
    run.write("eval.json", content)
    assert main.main(asked) == 0 and "choice" in run.read("eval.json")["tasks"]

    own = (run.path / "eval.json").read_bytes()
    assert main.main([*asked, "model.quantization=nf4"]) == 0
    other = run.read("eval.other.json")
    assert not other["tasks"]
    assert main.main(["evaluate", str(run.path), "model.quantization=nf4", "--quiet"]) == 0
    assert "choice" in run.read("eval.other.json")["tasks"]
    assert "stores the base model in nf4" in " ".join(other["settings"]["notes"])
    weights = load_file(base / "model.safetensors")
    save_file({name: one * 3 for name, one in weights.items()}, base / "model.safetensors", {"format": "pt"})
    assert main.main(asked) == 0
    other = run.read("eval.other.json")
    assert "the base model has changed since the run" in " ".join(other["settings"]["notes"])
    assert not other["tasks"]  # those of nf4 are not this base's
    assert (run.path / "eval.json").read_bytes() == own


def test_an_evaluation_on_other_examples_says_which_it_can_not_use(train, small, tmp_path, capsys) -> None:
    """They pass the checks of training: a loss of a part of the file would stand as the result."""
    run = train("eval.generate=false")
    training, held_out = (Path(option.partition("=")[2]) for option in small)
    rows = held_out.read_text().splitlines()
    (other := tmp_path / "other.jsonl").write_text("\n".join([*rows[:2], '{"messages": 5}', "{broken"]))
    many = {"messages": [{"role": "user", "content": "x " * 5000}, {"role": "assistant", "content": "y"}]}
    (long := tmp_path / "long.jsonl").write_text("\n".join([*rows[:2], json.dumps(many)]))
    copied = shutil.copy(training, tmp_path / "copy.jsonl")

    def said(*words: str) -> tuple[int, str]:
        code = main.main(["evaluate", str(run.path), *words])
        found = capsys.readouterr()
        return code, " ".join((found.out + found.err).split())

    own = (run.path / "eval.json").read_bytes()
    code, text = said(f"data.validation={other}")
    assert code == 2 and "other.jsonl:3" in text and "other.jsonl:4:2" in text
    code, text = said(f"data.validation={long}")
    assert code == 0 and "note: validation set: 1 of 3 examples" in text
    part, among = tmp_path / "part.jsonl", tmp_path / "among.json"
    part.write_text("\n".join(training.read_text().splitlines()[3:9]))
    among.write_text(
        json.dumps([json.loads(line) for line in [*training.read_text().splitlines()[:1], *rows]])
    )
    for path, counts in ((part, "6 of 6"), (among, "1 of 4")):
        code, text = said(f"data.validation={path}")
        assert code == 2 and f"the run was trained on {counts} examples" in text
    code, text = said(f"data.validation={among}", "data.expect.in_validation=1")
    assert code == 0 and "note: the run was trained on 1 of 4 examples" in text
    training.rename(training.with_suffix(".moved"))
    try:
        code, text = said(f"data.validation={copied}")
    finally:
        training.with_suffix(".moved").rename(training)
    assert (
        code == 0
        and "does not look for training examples in the validation set: the training data can" in text
    )
    content = training.read_text()
    training.write_text(held_out.read_text())  # other examples, or the files have changed places
    try:
        code, text = said(f"data.validation={copied}")
    finally:
        training.write_text(content)
    assert code == 0 and "validation set: the training data has changed since the run" in text
    for same in (copied, training):
        code, text = said(f"data.validation={same}")
        said_so = (
            "the run was trained on 96 of 96 examples",
            "a file is in the training set and in the validation",
        )
        assert code == 2 and any(one in text for one in said_so)
    for draws in (
        ["data.validation_fraction=0.5"],
        ["data.validation_fraction=0.2", "data.columns={a: text}"],
    ):
        code, text = said(*draws, "data.validation=null")
        assert code == 2 and text.count("can't draw other validation examples") == len(draws)
    code, text = said("model.add_tokens=[<zz>]")
    assert code == 2 and "`evaluate` does not use this key" in text
    assert (run.path / "eval.json").read_bytes() == own


@pytest.mark.parametrize("text", ["", "a"])
def test_general_texts_without_a_token_to_predict_are_an_error_or_a_note(
    text: str, train, tmp_path, capsys
) -> None:
    run = train("eval.generate=false")
    path = tmp_path / "general.jsonl"
    lines = [json.dumps({"text": text}), json.dumps({"text": "Once upon a time there was a bird."})]
    path.write_text("\n".join(lines[:1] * 3))
    words = ["evaluate", str(run.path), f"eval.forgetting={path}"]
    assert main.main(words) == 2
    assert "no general text has a token to predict" in capsys.readouterr().err
    path.write_text("\n".join([lines[0], *lines[1:] * 2]))
    assert main.main(words) == 0
    result = run.read("eval.json")
    assert "finetune skips 1 of 3 texts" in " ".join(result["settings"]["notes"])
    assert result["tasks"][tasks.GENERAL]["rows"] == 2


def test_a_config_without_a_number_of_positions_has_no_limit_of_texts() -> None:
    made = AutoConfig.for_model("llama", max_position_embeddings=0)
    assert token_limits.text_limit(made) is None


def test_the_best_weights_are_kept_and_a_run_that_gets_worse_stops(train, two_layers) -> None:
    """A rate that is far too high: every step after the first ones makes it worse."""
    asked = [f"model.name={two_layers}", "train.learning_rate=0.3", "train.lr_scheduler_type=constant"]
    run = train(*asked, "train.max_steps=12", "eval.eval_steps=1", "eval.early_stopping_patience=3")
    lines = [line for line in metrics(run) if "eval_loss" in line]
    losses = [line["eval_loss"] for line in lines]
    best = losses.index(min(losses))
    assert len(losses) == best + 4 < 12
    assert run.read("eval.json")["tuned"]["loss"] == pytest.approx(losses[best], rel=1e-6)
    got = run_checks(run)
    assert got["best weights saved"]["expected"].startswith(f"step {best + 1},")
    assert got["eval.eval_steps"]["actual"] == str(len(losses))
    assert got["steps planned"]["actual"] == "12"
    ran = f"{best + 4}, stopped early: no better evaluation in 3"
    assert got["steps"] == {**got["steps"], "actual": ran, "expected": "at most 12, with early stopping"}
    assert got["steps"]["passed"]
    assert "stopped at step" in (run.path / "log.txt").read_text()
    assert lines[-1]["best_step"] == best + 1
    assert [line["step"] for line in metrics(run) if "loss" in line][-1] == best + 4


def test_weights_before_the_first_update_are_not_the_best(train, two_layers) -> None:
    """The first step of warm-up has the learning rate 0, and all later steps make the model worse."""
    given = [f"model.name={two_layers}", "train.learning_rate=0.3", "train.warmup_steps=2"]
    run = train(
        *given, "train.max_steps=4", "eval.eval_steps=1", "eval.generate=false", "eval.forgetting=false"
    )
    losses = [line["eval_loss"] for line in metrics(run) if "eval_loss" in line]
    best = losses.index(min(losses[1:])) + 1
    assert losses[0] < min(losses[1:])
    assert run_checks(run)["best weights saved"]["expected"].startswith(f"step {best},")


def test_evaluating_does_not_change_the_training(train, two_layers, task_files) -> None:
    asked = [f"model.name={two_layers}", "train.max_steps=4", "adapter.lora_dropout=0.1"]
    plain = train(*asked, name="plain")
    named = f"eval.tasks={json.dumps([task_files[0], task_files[1]])}"
    watched = train(
        *asked,
        "eval.eval_steps=0.4",  # a share of four steps
        "eval.load_best_model_at_end=false",
        "eval.metric_for_best_model=choice/acc",
        "eval.limit=4",
        named,
        name="watched",
    )
    weights = [(run.adapter / "adapter_model.safetensors").read_bytes() for run in (plain, watched)]
    assert weights[0] == weights[1]
    lines = [line for line in metrics(watched) if "eval_loss" in line]
    assert [line["step"] for line in lines] == [2, 4]
    assert run_checks(watched)["eval.eval_steps"]["actual"] == "2"
    assert all(0 <= line["eval_choice/acc"] <= 1 for line in lines)
    assert [line["loss"] for line in metrics(plain)] == [x["loss"] for x in metrics(watched) if "loss" in x]


def test_adalora_keeps_no_weights_that_are_over_its_budget(train, two_layers) -> None:
    asked = [f"model.name={two_layers}", "adapter.type=adalora", "train.max_steps=12", "eval.eval_steps=1"]
    run = train(*asked, "train.learning_rate=0.1", "train.lr_scheduler_type=constant")
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    step = int(run_checks(run)["best weights saved"]["expected"].split()[1].rstrip(","))
    assert step >= config["total_step"] - config["tfinal"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["eval.eval_steps=5", "data.validation=null"], "needs a validation set"),
        (["eval.early_stopping_patience=2"], "needs `eval.eval_steps`"),
        (["eval.eval_steps=5", "eval.metric_for_best_model=accuracy"], "task/metric"),
        (
            ["eval.eval_steps=5", "eval.metric_for_best_model=arc/acc"],
            "`eval.tasks` lacks the task of this metric",
        ),
        (["eval.batch_size=atuo"], "auto"),
        (["eval.forgetting=nowhere.jsonl"], "general texts does not exist"),
    ],
)
def test_settings_that_make_no_sense(asked, said, capsys) -> None:
    assert main.main(["check", "recipes/quickstart.yaml", *asked]) == 2
    assert said in capsys.readouterr().err


def test_a_general_text_is_the_file_that_is_named(tmp_path, monkeypatch) -> None:
    """Rows of a task are looked up beside its file first: here data/data/general.jsonl would have been."""
    monkeypatch.chdir(tmp_path)
    for folder, text in (("data", "meant"), ("data/data", "another")):
        Path(folder).mkdir()
        Path(folder, "general.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert tasks.general_texts(Eval(forgetting="data/general.jsonl")) == ["meant"]


def test_a_batch_that_does_not_fit_is_halved_until_it_does(monkeypatch) -> None:
    tried = []

    def run(batch_size: int) -> str:
        tried.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return "done"

    assert scoring.fitting(run, "auto") == "done"
    assert tried == [64, 32, 16, 8, 4]
    with pytest.raises(torch.OutOfMemoryError):
        scoring.fitting(run, 16)
    with pytest.raises(torch.OutOfMemoryError):
        scoring.fitting(lambda batch_size: run(99), "auto")


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_two_processes_give_the_numbers_of_one(train, two_layers, task_files) -> None:
    """`accelerate launch scripts/evaluate.py RUN`, as a user runs it."""
    named = json.dumps([task_files[0], task_files[2], task_files[4]])
    run = train(f"model.name={two_layers}", f"eval.tasks={named}")
    before = run.read("eval.json")
    config = str(ROOT / "accelerate_configs" / "cpu_2.yaml")
    line = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config]
    done = subprocess.run([*line, "scripts/evaluate.py", str(run.path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    after = run.read("eval.json")
    assert after["settings"]["processes"] == 2 and done.stdout.count("validation loss  ") == 1
    for name in ("choice", "found", "likely"):
        for side in ("base", "tuned"):
            assert after["tasks"][name][side] == pytest.approx(before["tasks"][name][side], rel=1e-5)
        assert after["tasks"][name]["rows"] == before["tasks"][name]["rows"]
    assert after["tuned"]["loss"] == pytest.approx(before["tuned"]["loss"], rel=1e-6)
    assert after["samples"] == before["samples"]


def test_torchao_s_fp8_layers_are_scored(monkeypatch) -> None:
    """They know no inference mode: a run on GPUs ended in its evaluation, all trained."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, pad_inner_dim=True))
    with scoring.inference(model):
        made = model(input_ids=torch.arange(16)[None]).logits
    assert made.dtype == torch.bfloat16 and made.isfinite().all() and not made.requires_grad
