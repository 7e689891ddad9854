"""What a user gets for each way to get it wrong: exit code, place, and words that say what to do."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DATA, MODEL, QUICKSTART, ROOT
from tokenizers import processors

from finetune import cli
from finetune.data.prepare import prepare
from finetune.errors import UserError
from finetune.model import load_tokenizer
from finetune.sections import Data, Model

LINEAR = "down_proj, gate_proj, up_proj, k_proj, o_proj, q_proj, v_proj"

within_a_second = pytest.mark.alone

RECIPE = """model:
  name: "{model}"
data:
  name: "{data}"
adapter:
  type: lora
  r: 8
train:
  learning_rate: 1e-4
  max_steps: 4
"""


def stderr_of(command: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    started = time.monotonic()
    assert cli.main(command) == code
    assert time.monotonic() - started < 1
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return text


@within_a_second
@pytest.mark.parametrize(
    ("number", "old", "new", "phrases"),
    [
        (1, "learning_rate:", "learning_rat:", [":9:3", "unknown key", "learning_rate"]),
        (2, "  max_steps: 4", "  max_steps: 4\n  lora_alpha: 4", [":11:3", "belongs under adapter:"]),
        (3, "r: 8", "r: eight", [":7:3", "a whole number", '"eight"']),
        (5, "  r: 8", "  r: 8\n  r: 16", [":8:3", "the same key twice", ":7:3"]),
        (7, "r: 8", "r: !!python/object/apply:os.system [exit]", [":7:6", "tags are not allowed"]),
        (8, "r: 8", "r: &a [1]\n  s: [*a, *a]", ["aliases are not allowed"]),
        (8, "r: 8", "r: " + "8" * 50_000_000, ["too large"]),
        (9, "r: 8", "r: 0", [":7:3", ">= 1"]),
        (9, "r: 8", "lora_dropout: 1.5", [":7:3", "< 1"]),
        (9, "learning_rate: 1e-4", "effective_batch_size: 0", [":9:3", ">= 1"]),
        (9, "learning_rate: 1e-4", "learning_rate: -1e-4", [":9:3", ">= 0"]),
        (10, '"{data}"', '"{data}"\n  max_length: 0', [":5:3", "data.max_length", ">= 8"]),
        (11, "type: lora", "type: qlora\nspeed:\n  base: fp8\n#", ["speed.base", "adapter.type: qlora"]),
        (11, "type: lora", "type: ia3\n  use_dora: true", ["adapter.use_dora", "ia3"]),
        (11, "max_steps: 4", "max_steps: 4\n  num_train_epochs: 1", ["train.num_train_epochs", "drop one"]),
        (12, "r: 8", "target_modules: [q_proj, v_porj]", [":7:28", '"v_porj"', LINEAR, "v_proj"]),
        (13, "r: 8", "target_modules: [wq, wv]", ['"wq"', '"wv"', LINEAR]),
        (16, '"{data}"', "train.jsnl", [":4:3", "no such file: train.jsnl", str(ROOT)]),
        (44, '"{model}"', "./nowhere/model", [":2:3", "local path not found"]),
        (58, "max_steps: 4", "effective_batch_size: 30\n  per_device_train_batch_size: 8", ["24 or 32"]),
        (60, "max_steps: 4", "hub_token: hf_" + "a" * 30, [":10:3", "HF_TOKEN", "****"]),
        (60, '"{data}"', '"{data}"\n  revision: hf_' + "b" * 30, [":5:3", "HF_TOKEN"]),
    ],
)
def test_recipe(number: int, old: str, new: str, phrases: list[str], recipe_file, capsys) -> None:
    path = recipe_file(RECIPE.replace(old, new))
    text = stderr_of(["check", str(path)], 2, capsys)
    assert all(phrase in text for phrase in phrases), text
    assert "aaaa" not in text and "bbbb" not in text, "a secret is never shown"


def test_4_an_exponent_without_a_point_is_a_number(recipe_file, capsys) -> None:
    from finetune.recipe import load

    assert load(recipe_file(RECIPE)).train.learning_rate == 0.0001


@within_a_second
def test_9_all_together(recipe_file, capsys) -> None:
    text = RECIPE.replace("r: 8", "r: 0\n  lora_dropout: 1.5").replace("1e-4", "-1")
    text = stderr_of(["check", str(recipe_file(text))], 2, capsys)
    assert text.count("error:") == 3


CHAT = '{"messages": [%s]}'
USER, ANSWER = '{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}'
GOOD_ROW = CHAT % f"{USER}, {ANSWER}"


@pytest.fixture
def weightless(tmp_path) -> Path:
    """A model with a config and a tokenizer and no weights: what errs here errs before they load."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def rows(*lines: str, good: int = 0) -> bytes:
    """JSON lines, and after them so many good ones, each different."""
    more = [GOOD_ROW.replace('"a"', f'"a{index}"') for index in range(good)]
    return ("\n".join([*lines, *more]) + "\n").encode()


@pytest.mark.parametrize(
    ("number", "content", "phrases"),
    [
        (17, b"", ["0 rows in", "rows.jsonl"]),
        (18, b"\n\n  \n", ["0 rows in", "rows.jsonl"]),
        (19, rows(GOOD_ROW, "{'messages': 1}", GOOD_ROW), ["rows.jsonl:2:2", "'messages'"]),
        (19, rows(*["{"] * 7, good=3), ["rows.jsonl:5", "7 of 10 rows", "can't be read", "unreadable=0.7"]),
        (20, f"{GOOD_ROW}\n{GOOD_ROW[:-30]}".encode(), ["rows.jsonl:2:", "looks cut off"]),
        (
            21,
            GOOD_ROW.encode() + b'\n{"prompt": "\xff"}',
            ["rows.jsonl:2, byte", "not UTF-8", "Windows-1252"],
        ),
        (25, rows('{"question": "a", "reply": "b"}'), ["question, reply", "columns: {instruction: question"]),
        (27, rows(GOOD_ROW.replace("assistant", "gpt")), ["rows.jsonl:1, message 1", "gpt", "role_map"]),
        (28, rows(CHAT % f"{ANSWER}, {USER}"), ["rows.jsonl:1", "assistant begins", "assistant, user"]),
        (28, rows(CHAT % f"{USER}, {USER}, {ANSWER}"), ["rows.jsonl:1", "user after the user"]),
        (29, rows(CHAT % USER, good=9), ["rows.jsonl:1", "the last message must be the assistant's"]),
        (
            30,
            rows(GOOD_ROW.replace('"b"', "null")),
            ["rows.jsonl:1, message 1", "content must be text", "None"],
        ),
        (30, rows(GOOD_ROW.replace('"b"', "12")), ["rows.jsonl:1, message 1", "content must be text", "12"]),
        (30, rows(GOOD_ROW.replace('"b"', '""')), ["rows.jsonl:1, message 1", "content is empty"]),
        (30, rows('{"prompt": "a", "completion": 1}'), ["rows.jsonl:1", "completion must be text"]),
        (34, rows(GOOD_ROW.replace('"a"', f'"{"word " * 300}"'), good=9), ["1 of 10 rows", "rows.jsonl:1"]),
        (35, rows(GOOD_ROW.replace('"a"', f'"{"word " * 300}"')), ["0 of 1 rows", "raise data.max_length"]),
        (
            36,
            rows(*[GOOD_ROW.replace('"b"', '"b", "train": false')] * 2, good=2),
            ["2 of 4 rows", "rows.jsonl:1, :2"],
        ),
    ],
)
def test_data(
    number: int, content: bytes, phrases: list[str], recipe_file, tmp_path, weightless, capsys
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    text = RECIPE.replace("{data}", "rows.jsonl").replace("{model}", str(weightless))
    path = recipe_file(text.replace("adapter:", "  max_length: 64\nadapter:"))
    assert cli.main(["train", str(path), f"train.output_dir={tmp_path / 'run'}", "--quiet"]) == 2
    text = capsys.readouterr().err
    assert all(phrase in text for phrase in phrases), text
    assert "Traceback" not in text
    assert not (tmp_path / "run").exists(), "a run that never began leaves nothing behind"


def prepared(content: bytes, tmp_path, **more: object):
    """The rows of a file, as a run would have them."""
    (tmp_path / "rows.jsonl").write_bytes(content)
    data = Data.model_validate(
        {"name": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache"), **more}
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


def test_26_sharegpt_is_accepted_and_stated(tmp_path) -> None:
    turns = '{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}'
    report = prepared(rows(f'{{"conversations": [{turns}]}}'), tmp_path).report["train"]
    assert list(report.formats.values()) == ["sharegpt"] and report.kept == 1


def test_31_no_chat_template(weightless, recipe_file, capsys) -> None:
    (weightless / "chat_template.jinja").unlink()
    path = recipe_file(RECIPE.replace("{model}", str(weightless)))
    assert cli.main(["train", str(path), "--quiet"]) == 2
    text = capsys.readouterr().err
    assert "no chat template" in text and "chatml" in text and "Jinja file" in text


def test_32_a_template_that_does_not_tell_turns_apart(weightless, recipe_file, capsys) -> None:
    template = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    (weightless / "chat_template.jinja").write_text(template)
    path = recipe_file(RECIPE.replace("{model}", str(weightless)))
    assert cli.main(["train", str(path), "--quiet"]) == 2
    text = capsys.readouterr().err
    assert "neither marks the assistant's tokens nor renders turn by turn" in text and "test.jsonl:1" in text


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
    with pytest.raises(UserError, match="1 rows are too long"):
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
    found = prepare(Data(name=str(tmp_path / "rows.jsonl"), cache=str(tmp_path)), tokenizer, 0, None)
    assert [row["input_ids"].count(start) for row in found.train] == [1, 1]
    assert found.report["train"].counts["doubled_bos"] == 1
    assert "second BOS" in "\n".join(found.report["train"].remarks())


def test_22_bom_and_crlf_are_fine(tmp_path) -> None:
    content = b"\xef\xbb\xbf" + f"{GOOD_ROW}\r\n{GOOD_ROW}\r\n".encode()
    found = prepared(content, tmp_path, expect={"duplicates": 1})
    assert [row["where"][0].rpartition(":")[2] for row in found.train] == ["1", "2"]


@within_a_second
def test_16_a_near_file_is_named(recipe_file, capsys) -> None:
    path = recipe_file(RECIPE.replace("{data}", str(DATA / "tran.jsonl")))
    assert str(DATA / "train.jsonl") in stderr_of(["check", str(path)], 2, capsys)


@pytest.mark.parametrize(("tinit", "tfinal"), [(3, 3), (0, 7), (8, 0)])
def test_15_a_schedule_longer_than_the_run(tinit: int, tfinal: int, train, capsys) -> None:
    overrides = ["adapter.type=adalora", f"adapter.tinit={tinit}", f"adapter.tfinal={tfinal}"]
    train(*overrides, "train.max_steps=6", code=2)
    text = capsys.readouterr().err
    assert "adapter.tinit" in text and "6 steps" in text


def test_50_a_folder_of_another_run_is_left_alone(train, tmp_path, capsys) -> None:
    (tmp_path / "run").mkdir()
    kept = tmp_path / "run" / "weights.safetensors"
    kept.write_text("mine")
    train(code=2)
    text = capsys.readouterr().err
    assert "is not empty" in text and "weights.safetensors" in text and "nothing was deleted" in text
    assert kept.read_text() == "mine" and list((tmp_path / "run").iterdir()) == [kept]


def test_58_a_batch_that_processes_can_t_share() -> None:
    from finetune.batch import split_batch
    from finetune.errors import UserError
    from finetune.sections import Train

    assert split_batch(Train(effective_batch_size=48), 2) == (48, 8, 3)
    assert split_batch(Train(effective_batch_size=6, per_device_train_batch_size=3), 2) == (6, 3, 1)
    with pytest.raises(UserError, match="8 or 12") as raised:
        split_batch(Train(effective_batch_size=10, per_device_train_batch_size=2), 2)
    assert raised.value.code == 2


@within_a_second
def test_a_missing_recipe_names_the_nearest(capsys) -> None:
    assert "quickstart.yaml" in stderr_of(["check", str(ROOT / "recipes" / "quikstart.yaml")], 2, capsys)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_a_kernel_that_can_t_be_had_is_exit_3(attention: str, train, capsys) -> None:
    train(f"model.attention={attention}", code=3)
    text = capsys.readouterr().err
    assert f"{QUICKSTART}" in text or "override" in text
    assert "needs an NVIDIA GPU" in text and "attention: auto" in text


def test_a_loss_that_is_not_finite_stops_the_run(train, capsys) -> None:
    run = train("train.learning_rate=1e30", "train.max_steps=6", code=5)
    assert "not finite" in capsys.readouterr().err
    assert not run.adapter.exists()
    assert run.read("receipts.json")


def test_debug_shows_the_traceback(recipe_file) -> None:
    from finetune.errors import UserError

    with pytest.raises(UserError):
        cli.main(["check", str(recipe_file(RECIPE.replace("r: 8", "r: 0"))), "--debug"])


@within_a_second
def test_as_a_user_runs_it_five_mistakes_five_messages(recipe_file) -> None:
    text = RECIPE.replace("learning_rate", "learning_rat").replace("r: 8", "r: 0\n  lora_dropout: 2")
    path = recipe_file(text.replace("max_steps: 4", "max_steps: many\n  warmup_ratio: 0.1"))
    command = [sys.executable, "-X", "importtime", "-m", "finetune", "check", str(path)]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert time.monotonic() - started < 2  # importtime itself costs; without it the bar is 1 s (test_cli)
    assert done.returncode == 2
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert imports and not any(line.split("|")[-1].strip() in ("torch", "transformers") for line in imports)
    assert sum(line.startswith("error:") for line in done.stderr.splitlines()) == 5


def test_model_folder_without_weights(recipe_file, tmp_path, train, capsys) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((MODEL / name).read_bytes())
    train(f"model.name={tmp_path / 'model'}", code=2)
    assert "does not hold a model that loads" in capsys.readouterr().err


@within_a_second
@pytest.mark.parametrize(
    ("old", "new", "phrases"),
    [
        ("r: 8", "target_modules: '(q_proj'", ["not a regular expression"]),
        ("r: 8", "target_modules: q_proj", ["[q_proj]"]),
        ('"{data}"', "'~nobodyx/a.jsonl'", ["no such file"]),
        (
            '"{data}"',
            str(DATA) + "\n  validation: " + str(DATA / "test.jsonl"),
            ["both trained on and held out"],
        ),
        ('"{data}"', '"{data}"\n  validation: org/name', ["held-out rows come from a file"]),
        ('"{data}"', str(DATA.parent), ["no .jsonl, .json, .csv"]),
    ],
)
def test_more_of_what_check_sees(old: str, new: str, phrases: list[str], recipe_file, capsys) -> None:
    text = stderr_of(["check", str(recipe_file(RECIPE.replace(old, new)))], 2, capsys)
    assert all(phrase in text for phrase in phrases), text


@within_a_second
def test_a_git_lfs_pointer_is_not_a_model(recipe_file, tmp_path, capsys) -> None:
    (tmp_path / "model").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n"
    (tmp_path / "model" / "model.safetensors").write_text(pointer)
    path = recipe_file(RECIPE.replace('"{model}"', str(tmp_path / "model")))
    assert "not a safetensors file" in stderr_of(["check", str(path)], 2, capsys)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.effective_batch_size=1000", "96 rows are fewer than one step takes"),
        ("adapter.rank_pattern={q_prj: 4}", "q_proj"),
        ("adapter.exclude_modules=[q_prj]", "q_proj"),
        ("train.dataloader_prefetch_factor=2", "SFTConfig refuses it"),
    ],
)
def test_what_is_seen_once_model_and_data_are_there(override: str, says: str, train, capsys) -> None:
    train(override, code=2)
    assert says in capsys.readouterr().err
