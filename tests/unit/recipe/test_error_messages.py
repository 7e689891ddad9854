"""What a user gets for each way to get it wrong: exit code, place, and words that say what to do."""

import os
import re
import shutil
import struct
import subprocess
import sys
import time

import pytest
from tokenizers import processors

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.data.preparation import prepare
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe import loader
from finetune.recipe.schema import Data, Model
from support.paths import DATA, MODEL, QUICKSTART, ROOT
from support.recipe_texts import CHAT, GOOD_ROW, RECIPE, USER, rows

within_a_second = pytest.mark.alone


def stderr_of(command: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    started = time.monotonic()
    assert main.main(command) == code
    assert time.monotonic() - started < 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@within_a_second
def test_9_all_together(recipe_file, capsys) -> None:
    text = RECIPE.replace("r: 8", "r: 0\n  lora_dropout: 1.5").replace("1e-4", "-1")
    text = stderr_of(["check", str(recipe_file(text))], 2, capsys)
    assert text.count("error:") == 3


def prepared(content: bytes, tmp_path, **more: object):
    """The rows of a file, as a run would have them."""
    (tmp_path / "rows.jsonl").write_bytes(content)
    data = Data.model_validate(
        {"name": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "cache"), **more}
    )
    return prepare(data, load_tokenizer(Model(name=str(MODEL))), 0, 4096)


def test_20_29_36_few_enough_are_left_out_and_counted(tmp_path) -> None:
    unanswered, untrained = CHAT % USER, GOOD_ROW.replace('"b"', '"b", "train": false')
    content = rows(unanswered, untrained, good=98) + GOOD_ROW[:-9].encode()
    report = prepared(content, tmp_path, expect={"unreadable": 0.01}).report["train"]
    assert (report.rows, report.kept, report.dropped) == (101, 98, 3)
    assert report.counts == {"unanswered": 1, "nothing_trained": 1, "unreadable": 1}
    said = "\n".join(report.remarks())
    assert "rows.jsonl:1)" in said and "rows.jsonl:2)" in said and "rows.jsonl:101:" in said


def test_34_too_long_is_a_policy(tmp_path) -> None:
    content = rows(GOOD_ROW.replace('"a"', f'"{"word " * 300}end?"'), good=2)
    short = prepared(content, tmp_path, max_length=64, too_long="truncate_prompt")
    report = short.report["train"]
    assert (report.kept, report.counts) == (3, {"shortened": 1}) and report.cut_tokens > 200
    tokenizer = load_tokenizer(Model(name=str(MODEL)))
    first = short.train[0]
    assert len(first["input_ids"]) <= 64 and first["cut"][0] == report.cut_tokens
    text = tokenizer.decode(first["input_ids"])
    assert text.startswith("<|im_start|>user") and "end?<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\nb<|im_end|>\n"), "the answer is whole"
    with pytest.raises(UserError, match="1 example is too long"):
        prepared(content, tmp_path, max_length=64, too_long="error")


def test_39_one_bos_and_a_remark(tmp_path) -> None:
    tokenizer = load_tokenizer(Model(name=str(MODEL)))
    with_bos = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    with_bos.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", None, [("<|im_start|>", start)]
    )
    tokenizer._tokenizer, tokenizer.bos_token = with_bos, "<|im_start|>"
    content = rows('{"text": "<|im_start|>one two"}', '{"text": "three four"}')
    (tmp_path / "rows.jsonl").write_bytes(content)
    found = prepare(Data(name=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path)), tokenizer, 0, None)
    assert [row["input_ids"].count(start) for row in found.train] == [1, 1]
    assert found.report["train"].counts["doubled_bos"] == 1
    assert "second BOS" in "\n".join(found.report["train"].remarks())


def test_58_a_batch_that_processes_can_t_share() -> None:
    from finetune.autoconfig.batch_size import split_batch
    from finetune.core.errors import UserError
    from finetune.recipe.schema import Train

    assert split_batch(Train(effective_batch_size=48), 2) == (48, 8, 3)
    assert split_batch(Train(effective_batch_size=6, per_device_train_batch_size=3), 2) == (6, 3, 1)
    with pytest.raises(UserError, match="8 or 12") as raised:
        split_batch(Train(effective_batch_size=10, per_device_train_batch_size=2), 2)
    assert raised.value.code == 2


@within_a_second
def test_a_missing_recipe_names_the_nearest(capsys) -> None:
    assert "quickstart.yaml" in stderr_of(["check", str(ROOT / "recipes" / "quikstart.yaml")], 2, capsys)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("adapter.type=lroa", "adapter.type=lora"),
        ("adapter.type=droa", "adapter.type=dora"),
        ("train.optim=adam", "train.optim=adamw_torch"),
        ("train.lr_scheduler_type=cosin", "train.lr_scheduler_type=cosine"),
        ("train.learning_raet=1e-4", "rename it to `learning_rate`"),
    ],
)
def test_letters_that_changed_places_and_a_name_not_ended_are_the_likeliest(override, meant, capsys) -> None:
    said = stderr_of(["check", str(ROOT / "recipes" / "quickstart.yaml"), override], 2, capsys)
    assert re.search(rf"help: +{meant}$", said, re.MULTILINE), said


def test_a_loss_that_is_not_finite_stops_the_run(train, capsys) -> None:
    run = train("train.learning_rate=1e30", "train.max_steps=6", code=5)
    assert "NaN or Inf" in capsys.readouterr().err
    assert not run.adapter.exists()
    assert run.read("checks.json")


def test_a_log_shows_nan_as_nan() -> None:
    """The Trainer's own default logs an old average in its place."""
    from finetune.autoconfig.batch_size import split_batch
    from finetune.preflight.choice_checks import setup_of
    from finetune.recipe import loader
    from finetune.training import training_arguments

    loaded = loader.load(QUICKSTART)
    batch = split_batch(loaded.train, 1)
    arguments = training_arguments.training_arguments(loaded.train, loaded.data, setup_of(loaded), batch)
    assert arguments.logging_nan_inf_filter is False


def test_debug_shows_the_traceback_and_keeps_the_exit_code(recipe_file, capsys) -> None:
    assert main.main(["check", str(recipe_file(RECIPE.replace("r: 8", "r: 0"))), "--debug"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.count("error: adapter.r: ") == 2


@within_a_second
def test_as_a_user_runs_it_five_mistakes_five_messages(recipe_file) -> None:
    text = RECIPE.replace("learning_rate", "learning_rat").replace("r: 8", "r: 0\n  lora_dropout: 2")
    path = recipe_file(text.replace("max_steps: 4", "max_steps: many\n  warmup_ratio: 0.1"))
    command = [sys.executable, "-X", "importtime", "-m", "finetune", "check", str(path)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert time.monotonic() - started < 2  # importtime itself costs; without it the bar is 1 s (test_main)
    assert done.returncode == 2
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert imports and not any(line.split("|")[-1].strip() in ("torch", "transformers") for line in imports)
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 5


def test_model_folder_without_weights(recipe_file, tmp_path, train, capsys) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((MODEL / name).read_bytes())
    train(f"model.name={tmp_path / 'model'}", code=2)
    assert "has no weights that transformers reads" in capsys.readouterr().err


@within_a_second
@pytest.mark.parametrize(
    ("old", "new", "phrases"),
    [
        ("r: 8", "target_modules: '(q_proj'", ["not a valid regular expression"]),
        ("r: 8", "target_modules: q_proj", ["[q_proj]"]),
        ('"{data}"', "'~nobodyx/a.jsonl'", ["does not exist"]),
        (
            '"{data}"',
            str(DATA) + "\n  validation: " + str(DATA / "train.jsonl"),
            ["in the training set and in the validation set"],
        ),
        ('"{data}"', '"{data}"\n  validation: org/name', ["the validation set must be a local file"]),
        ('"{data}"', str(ROOT / "accelerate_configs"), ["has no data file"]),
    ],
)
def test_more_of_what_check_sees(old: str, new: str, phrases: list[str], recipe_file, capsys) -> None:
    text = stderr_of(["check", str(recipe_file(RECIPE.replace(old, new)))], 2, capsys)
    assert all(phrase in text for phrase in phrases), text


@within_a_second
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (struct.pack("<Q", 5) + b"hello", "Expecting value"),
        ((MODEL / "model.safetensors").read_bytes()[:-1], "its tensors end at byte"),
        (struct.pack("<Q", 2) + b"[]", "no attribute 'items'"),
        (b"", "its header would be 0 bytes, the file is 0"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "maximum recursion depth exceeded"),
    ],
    ids=["corrupt", "truncated", "a list", "empty", "deep"],
)
def test_what_is_not_all_of_a_safetensors_file_is_said(
    content: bytes, says: str, recipe_file, tmp_path, capsys
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    shutil.copy(MODEL / "config.json", tmp_path / "model")
    path = recipe_file(RECIPE.replace('"{model}"', str(tmp_path / "model")))
    said = stderr_of(["check", str(path)], 2, capsys)
    assert "is not a safetensors file" in said and says in said and "download the model again" in said


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.effective_batch_size=1000", "one step needs 1000 sequences, and the training data has 96"),
        ("adapter.rank_pattern={q_prj: 4}", "q_proj"),
        ("adapter.exclude_modules=[q_prj]", "q_proj"),
        ("train.dataloader_prefetch_factor=2", "needs data loader workers"),
        ("train.dataloader_persistent_workers=true", "needs data loader workers"),
        ("train.router_aux_loss_coef=0.1", "the base model has no router"),
    ],
)
def test_what_is_seen_once_model_and_data_are_there(override: str, says: str, train, capsys) -> None:
    """All but what the model itself has is seen by a dry run too."""
    for dry in [[], *[["--dry-run"]] * ("router" not in override)]:
        train(override, *dry, code=2)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "expected", "fix"),
    [
        ("train.output_dir=s3://bucket/run", "a local path", "name a local folder, and copy it afterwards"),
        ("data.cache_dir=gs://bucket/cache", "a local path", "name a local folder, and copy it afterwards"),
        ("data.template_date=yesterday", "a date such as 2026-07-31", "correct the date"),
    ],
)
def test_value_that_a_rule_refuses_has_the_remedy_of_this_rule(
    override: str, expected: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        loader.load(QUICKSTART, [override])
    (problem,) = caught.value.problems
    assert (problem.expected, problem.fix) == (expected, fix) and problem.key == override.partition("=")[0]


@pytest.mark.parametrize("name", ["b\\0.jsonl", "x" * 5000], ids=["NUL", "too long"])
def test_a_path_that_no_file_can_have_is_an_error_in_the_words_of_the_rule(name: str, tmp_path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f'model: {{name: a}}\ndata: {{name: "{name}"}}\nadapter: {{type: lora}}\n')
    with pytest.raises(UserError) as caught:
        loader.load(path)
    (problem,) = caught.value.problems
    assert problem.what == "the path is too long or has a NUL character" and problem.key == "data.name"
