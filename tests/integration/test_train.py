"""Runs: every adapter trains through the command, and each run check is verified from outside."""

import json
import resource
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, TrainerCallback

from finetune.cli import main
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.core.run_checks import RunChecks
from finetune.models import tokenizer_setup
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe import loader
from finetune.recipe.schema import Model
from finetune.run_folder import settings_text
from finetune.run_folder.run_folder import RunFolder
from finetune.speed import activation_offload, apply_to_model
from finetune.training import pipeline, run_context, saved_evaluation, saving
from support import two_ranks
from support.paths import MODEL, QUICKSTART, ROOT
from support.runs import metrics, run_checks
from support.soak import soak_except
from support.trainers import trainer_of

FILES = {
    "recipe.resolved.yaml",
    "environment.json",
    "data_report.json",
    "checks.json",
    "metrics.jsonl",
    "eval.json",
    "log.txt",
}


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
def test_a_run_trains_and_verifies(kind: str, train) -> None:
    """Every type: test_adapter_types.py."""
    rate = "1e-3" if kind == "full" else "5e-3"
    run = train(f"adapter.type={kind}", f"train.learning_rate={rate}", "train.max_steps=6")
    assert {path.name for path in run.path.iterdir()} >= FILES
    got = run_checks(run)
    assert all(check["passed"] for check in got.values())
    assert got["adapter.type"]["actual"] == ("full" if kind == "full" else "LORA")
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert lines[-1]["loss"] < lines[0]["loss"]
    scores = run.read("eval.json")
    assert scores["tuned"]["loss"] < scores["base"]["loss"]


@pytest.mark.parametrize("kind", soak_except(["lora", "adalora"], ["lora", "dora", "ia3", "adalora"]))
def test_what_is_saved_loads_in_plain_peft(kind: str, train, two_layers) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train(f"adapter.type={kind}", "train.max_steps=4", "train.learning_rate=1e-2")
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert tensors and all(tensor.numel() and tensor.isfinite().all() for tensor in tensors.values())
    tokenizer = AutoTokenizer.from_pretrained(run.adapter)
    ids = tokenizer("Maria ordered three kettles.", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
        tuned = PeftModel.from_pretrained(base, run.adapter)
        after = tuned(ids).logits
        with tuned.disable_adapter():
            assert torch.equal(tuned(ids).logits, before)
    assert not torch.equal(before, after)


def test_adalora_ends_at_its_budget(train) -> None:
    run = train("adapter.type=adalora", "adapter.r=4", "train.max_steps=8", "train.learning_rate=1e-2")
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    assert config["init_r"] == 6 and config["target_r"] == 4 and config["total_step"] == 8
    masks = config["rank_pattern"].values()
    assert sum(map(sum, masks)) == 4 * len(masks)
    assert len({sum(mask) for mask in masks}) > 1, "every module kept the same rank: nothing was allocated"
    assert "# init_r: 6  (default: made for this run)" in run.recipe.read_text()


def test_adalora_s_regulariser_reaches_the_gradients(train) -> None:
    strong = train("adapter.type=adalora", "adapter.orth_reg_weight=50", "train.max_steps=6", name="strong")
    none = train("adapter.type=adalora", "adapter.orth_reg_weight=0", "train.max_steps=6", name="none")
    weak, without = metrics(strong), metrics(none)
    assert weak[0]["loss"] == without[0]["loss"], "the loss shown is that of the tokens"
    assert weak[-1]["orthogonality"] < weak[0]["orthogonality"]
    assert weak[0]["grad_norm"] > 2 * without[0]["grad_norm"]


def test_the_same_run_twice_is_the_same(train) -> None:
    first, second = (train("adapter.lora_dropout=0.1", "train.max_steps=3", name=name) for name in "ab")
    assert [line["loss"] for line in metrics(first)] == [line["loss"] for line in metrics(second)]
    assert [line["grad_norm"] for line in metrics(first)] == [line["grad_norm"] for line in metrics(second)]


def test_how_a_batch_is_split_does_not_matter(train, small, tmp_path) -> None:
    """8 = 8 x 1 = 2 x 4: rows of unequal numbers of trained tokens weigh by token.

    Each epoch ends with five rows. The parameters, in float64: test_two_ranks.py.
    """
    lines = Path(small[0].partition("=")[2]).read_text().splitlines()[:21]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    given = [f"data.name={tmp_path / 'rows.jsonl'}", "train.max_steps=8", "train.effective_batch_size=8"]
    whole = train(*given, "train.per_device_train_batch_size=8", name="whole")
    split = train(*given, "train.per_device_train_batch_size=2", name="split")
    apart = []
    for a, b in zip(metrics(whole), metrics(split), strict=True):
        apart.append(a["loss"] - b["loss"])
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    assert max(map(abs, apart)) <= 1e-6 and abs(sum(apart) / len(apart)) <= 2e-7


def test_a_model_whose_own_loss_takes_no_count_is_never_rescaled(train, monkeypatch) -> None:
    """As those of images and text are: our loss and TRL's count the labels of a step themselves."""
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    whole = train("train.per_device_train_batch_size=4", name="whole")
    split = train("train.per_device_train_batch_size=2", name="split")
    theirs = train("train.per_device_train_batch_size=2", "speed.loss=trl", name="theirs")
    for a, b, c in zip(metrics(whole), metrics(split), metrics(theirs), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["loss"] == pytest.approx(c["loss"], abs=1e-5)


@pytest.mark.soak
def test_recomputing_layers_changes_nothing_but_time(train) -> None:
    plain = train(name="plain")
    for asked, got in (
        ("full", "2 of 2"),
        ("full:1", "1 of 2, and 2 norms"),
        ("norms", "0 of 2, and 4 norms"),
    ):
        again = train(f"speed.activation_checkpointing={asked}", name=f"checkpointing-{asked}")
        assert [m["loss"] for m in metrics(plain)] == [m["loss"] for m in metrics(again)]
        assert run_checks(again)["speed.activation_checkpointing"]["actual"] == got
        assert loader.load(again.recipe).speed.activation_checkpointing == asked
    fast = train("speed.fused=true", name="fast")
    for asked, count in (("mlp", 2), ("mlp:1", 1)):
        again = train("speed.fused=true", f"speed.activation_checkpointing={asked}", name=asked)
        assert [m["loss"] for m in metrics(fast)] == [m["loss"] for m in metrics(again)]
        assert (
            run_checks(again)["speed.activation_checkpointing"]["actual"]
            == f"0 of 2, and 4 norms, gate and up of {count} MLPs"
        )
        assert loader.load(again.recipe).speed.activation_checkpointing == asked


def test_modules_are_put_into_training_where_they_are_not(small, two_layers, tmp_path) -> None:
    """And not all of them before every forward, which upstream does."""
    walks, modes = [], []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.layer = model.get_submodule("base_model.model.model.layers.1")
            own = self.layer.train
            self.layer.train = lambda mode=True: walks.append(mode) or own(mode)
            self.layer.register_forward_hook(lambda layer, *_: modes.append(layer.mlp.training))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                self.layer.mlp.eval()

    more = ["train.max_steps=6", "train.per_device_train_batch_size=4"]
    trainer = trainer_of(two_layers, tmp_path, "chunked", small[0], *more)
    trainer.add_callback(Watch())
    trainer.train()
    assert modes == [True] * 12 and len(walks) <= 2


@pytest.mark.parametrize("kind", ["plain", "offloaded", "qat"])
def test_the_trained_model_is_gone_when_it_is_opened_again(
    kind: str, small, two_layers, tmp_path, monkeypatch
) -> None:
    """All of it: what looks on must not hold its layers."""
    modules, left = list[Any](), list[Any]()
    clear, recompute = saved_evaluation.clear_device_cache, apply_to_model.add_activation_checkpointing

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            modules.extend(map(weakref.ref, model.modules()))

    def watched(**given: bool) -> None:
        clear(**given)
        left.append([one() for one in modules if one() is not None])

    def offloaded(model: Any, layers: Any, *given: Any, **named: Any) -> None:
        recompute(model, layers, *given, **named)
        activation_offload.Activations(layers, torch.device("cpu"))  # which the recipe has on GPUs alone

    monkeypatch.setattr(saved_evaluation, "clear_device_cache", watched)
    if kind == "offloaded":
        monkeypatch.setattr(apply_to_model, "add_activation_checkpointing", offloaded)
    given = [*small, f"model.name={two_layers}", f"train.output_dir={tmp_path / 'run'}", "train.max_steps=2"]
    more = {"offloaded": ["speed.activation_checkpointing=full"], "qat": ["speed.qat.config=IntxWeightOnly"]}
    given += ["eval.forgetting=false", "eval.max_new_tokens=1", *more.get(kind, [])]
    pipeline.run(loader.load(str(QUICKSTART), given), verbosity="quiet", callbacks=[Look()])
    assert len(modules) > 40 and left[0] == []


def test_the_run_folder_explains_itself(train) -> None:
    run = train("adapter.type=ia3")
    text = run.recipe.read_text()
    assert 'type: "ia3"  # override' in text and 'attention: "sdpa"  # hardware:' in text
    assert "# gradient_accumulation_steps: 1" in text
    assert "adapter.r: finetune ignores 16: ia3 has no such key" in text
    assert loader.load(run.recipe).adapter.type == "ia3"
    environment = run.read("environment.json")
    assert environment["packages"]["torch"] and environment["git"]["commit"]
    assert environment["hardware"]["device"] == "cpu" and environment["launch"]["processes"] == 1
    assert environment["sft_config"]["optim"] == "adamw_torch_fused"
    data = run.read("data_report.json")
    assert data["train"]["rows"] == 96 and data["train"]["counts"] == {}
    assert len(next(iter(data["train"]["sources"].values()))) == 64
    assert yaml.safe_load(text)["data"]["name"].startswith("/")


def test_a_run_can_be_evaluated_again(train, capsys) -> None:
    run = train("train.max_steps=4")
    before = run.read("eval.json")
    (run.path / "eval.json").unlink()
    assert main.main(["evaluate", str(run.path)]) == 0
    after = run.read("eval.json")
    assert before["settings"].pop("seconds") and after["settings"].pop("seconds")
    assert after == before
    assert "exact match" in capsys.readouterr().out


def test_without_held_out_rows_it_trains_all_the_same(train, recipe_file) -> None:
    path = recipe_file("model: {name: '{model}'}\ndata: {name: '{data}'}\nadapter: {type: lora}\n")
    folder = path.parent / "run"
    overrides = [f"train.output_dir={folder}", "train.max_steps=2", "train.effective_batch_size=8"]
    overrides.append("eval.forgetting=false")
    assert main.main(["train", str(path), *overrides, "--quiet"]) == 0
    assert RunFolder(folder).read("eval.json")["base"] == {}


def test_held_out_loss_is_that_of_a_plain_loop(train, two_layers) -> None:
    """Our batched, padded sum against one row at a time through transformers' own loss."""
    from transformers import AutoModelForCausalLM

    from finetune.data.preparation import held_out

    run = train()
    loaded = loader.load(run.recipe)
    rows, _ = held_out(loaded.data, tokenizer_setup.load_tokenizer(loaded.model), 0)
    assert len(rows) == 3
    model = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
    total = count = 0.0
    for row in rows:
        (document,) = row.documents
        ids, labels = torch.tensor([document.ids]), torch.tensor([document.labels()])
        tokens = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * tokens
        count += tokens
    assert run.read("eval.json")["base"]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_full_fine_tuning_leaves_a_model_and_its_base_untouched(train, two_layers) -> None:
    before = (two_layers / "model.safetensors").read_bytes()
    run = train("adapter.type=full", "train.learning_rate=1e-3")
    assert not run.adapter.exists() and (run.model / "model.safetensors").exists()
    assert (two_layers / "model.safetensors").read_bytes() == before


@pytest.mark.soak
@pytest.mark.usefixtures("the_only_launch")
def test_two_processes_learn_what_one_does(train, small, two_layers, tmp_path) -> None:
    """By `finetune train --accelerate`, as the README says; scripts/train.py: test_two_hosts.py."""
    overrides = ["train.warmup_steps=0", "train.per_device_train_batch_size=4", *small, "train.max_steps=4"]
    overrides += ["train.effective_batch_size=8", "eval.max_new_tokens=8", "eval.forgetting=false"]
    overrides += [f"model.name={two_layers}", f"train.output_dir={tmp_path / 'two'}"]
    line = [sys.executable, "-m", "finetune", "train", str(QUICKSTART), "--accelerate", "cpu_2", *overrides]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    split = "train.effective_batch_size=8", "train.per_device_train_batch_size=4"
    one, two = train("train.max_steps=4", *split, name="one"), RunFolder(tmp_path / "two")
    two_ranks.compare(one, two)
    name = "loss tokens in step 1"  # of both processes: one may have none, where they share a row
    assert run_checks(two)[name]["actual"] == run_checks(one)[name]["actual"]
    assert done.stdout.count("run checks") == 1, "only rank 0 speaks"


def test_adalora_on_a_bf16_base_saves_what_it_trained(train, in_bf16: str) -> None:
    """PEFT leaves `ranknum` trainable there and does not save it: the adapter on disk was another one."""
    given = ["train.max_steps=4", "train.learning_rate=2e-2", "data.validation=null"]
    run = train(in_bf16, "adapter.type=adalora", *given)
    got = run_checks(run)
    assert got["dtype"]["actual"] == "bfloat16" and got["precision"]["actual"] == "bf16"
    assert got["saved weights"]["actual"] == "0"
    assert set(got["trained weights changed"]["actual"].split()[::4]) == {"lora_A", "lora_B", "lora_E"}


@pytest.mark.parametrize(
    "override",
    soak_except(
        ["adapter.layers_to_transform=[1]", "train.logging_steps=10"],
        [
            "adapter.exclude_modules=[o_proj]",
            "adapter.layers_to_transform=[1]",
            "train.dataloader_drop_last=true",
            "model.quantization=none",
            "train.logging_steps=10",
        ],
    ),
)
def test_no_valid_option_fails_a_run_check(override: str, train) -> None:
    run = train(override)
    assert all(check["passed"] for check in run_checks(run).values())
    assert metrics(run)[-1]["step"] == 2, "the last step is always logged"


def test_a_model_is_saved_whatever_its_generation_config_holds(two_layers, tmp_path, capsys) -> None:
    """And it ends its answers where it was taught to: of bases, <|im_end|> often is no end."""
    tuned, tokenizer = LlamaForCausalLM.from_pretrained(two_layers), load_tokenizer(Model(name=str(MODEL)))
    tuned.generation_config.temperature = 0.9  # and it does not sample
    tuned.generation_config.eos_token_id = 1
    run = RunFolder(tmp_path)
    saving.save(tuned, tokenizer, run, tmp_path, Console())
    said = " ".join(capsys.readouterr().out.split())
    assert "do_sample: true, which temperature 0.9 of the base needs" in said
    assert "eos_token_id [1, 3] in generation_config.json, in place of 1" in said
    saved = LlamaForCausalLM.from_pretrained(run.model).generation_config
    assert saved.temperature == 0.9 and saved.eos_token_id == [1, 3]


def test_a_disk_that_is_full_is_what_is_said_of_it(tmp_path) -> None:
    """The error names the full disk, not log.txt and checks.json."""
    setup: Any = SimpleNamespace(launch=SimpleNamespace(main=True))
    recipe: Any = None
    run = run_context.RunContext(recipe, setup, RunChecks(), Console(quiet=True), RunFolder(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file may grow, as on a full disk
    try:
        with pytest.raises(UserError, match="no checkpoint"), run_context.recording(run):
            raise UserError(Problem("no checkpoint"))
        with pytest.raises(OSError, match="File too large"), run_context.recording(run):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_held_out_rows_must_be_those_of_the_run(train, tmp_path, capsys) -> None:
    rows = (MODEL.parent / "data" / "test.jsonl").read_text().splitlines()[:8]
    rows[0] = rows[0].replace('"content": "', '"content": "\u2028', 1)  # an end of line to str.splitlines
    (tmp_path / "validation.jsonl").write_text("\n".join(rows), encoding="utf-8")
    run = train(f"data.validation={tmp_path / 'validation.jsonl'}")
    before = run.read("eval.json")["tuned"]
    (tmp_path / "validation.jsonl").write_text("\n".join(rows[:-1]))
    assert main.main(["evaluate", str(run.path), "--quiet"]) == 0  # the run folder has kept them
    assert run.read("eval.json")["tuned"] == before
    (run.path / "validation.jsonl").unlink()
    assert main.main(["evaluate", str(run.path)]) == 2
    assert "changed since the run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", soak_except(["qlora", "full"], ["qlora", "dora", "ia3", "full"]))
def test_under_bf16_too_what_is_saved_is_what_was_trained(kind: str, train, in_bf16: str) -> None:
    got = run_checks(train(in_bf16, f"adapter.type={kind}", "data.validation=null"))
    assert got["dtype"]["actual"] == "bfloat16" and got["saved weights"]["actual"] == "0"
    assert got["saved tensors"]["actual"] == got["saved tensors"]["expected"]


def test_a_dry_run_says_what_would_be_done_and_leaves_nothing(small, two_layers, tmp_path, capsys) -> None:
    run = tmp_path / "run"
    words = [str(QUICKSTART), *small, f"model.name={two_layers}", f"train.output_dir={run}", "--dry-run"]
    assert main.main(["train", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "in the loss" in said and "memory per device" in said and "activation checkpointing" in said
    assert "dry run: nothing was trained; next: finetune train" in said and not run.exists()
    run.mkdir()
    (run / "notes.txt").touch()
    assert main.main(["train", *words]) == 2
    assert f"{run} is not empty" in capsys.readouterr().err


def test_one_step_of_warm_up_is_no_training(train, capsys) -> None:
    """Its learning rate is 0, which the weights would show after the step."""
    train("train.max_steps=1", "train.warmup_steps=0.03", code=2)
    assert "train.warmup_steps" in capsys.readouterr().err
    train("train.max_steps=1", "train.warmup_steps=0.03", "train.lr_scheduler_type=constant", name="even")


@pytest.mark.soak
def test_a_warm_up_that_outlasts_the_run_is_said(train) -> None:
    said = "note: the learning rate never reaches its peak: "
    for given, steps in (("train.warmup_steps=3", 3), ("train.warmup_steps=0.9", 2)):
        run = train(f"train.max_steps={steps}", given, "train.logging_steps=1", name=f"short-{steps}")
        warm_up = f"the warm-up takes {steps} steps, and the run has {steps}"
        assert f"{said}{warm_up}" in (run.path / "log.txt").read_text()
        assert max(line["learning_rate"] for line in metrics(run)) < 4e-3
    run = train("train.max_steps=3", "train.warmup_steps=2", "train.logging_steps=1", name="long")
    assert said not in (run.path / "log.txt").read_text()
    assert max(line["learning_rate"] for line in metrics(run)) == 4e-3


def test_resolved_recipe_has_the_defaults_of_the_libraries_as_comments(train) -> None:
    run = train("train.weight_decay=0.1")
    lines = (run.path / "recipe.resolved.yaml").read_text().splitlines()
    for default in ("max_grad_norm: 1.0", "lora_dropout: 0.0"):
        assert f"  # {default}  (default of the library)" in lines
    assert "  weight_decay: 0.1  # override" in lines
    kept = {f"{setting.section}.{setting.key}" for setting in settings_text.settings("\n".join(lines), 2)}
    assert "train.weight_decay" in kept and "train.max_grad_norm" not in kept
    assert loader.load(run.recipe).train.passed_on()["weight_decay"] == 0.1
