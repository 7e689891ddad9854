"""What a user gets for each way to get it wrong: exit code, place, and words that say what to do."""

import os
import subprocess
import sys
import time

import pytest
from conftest import DATA, MODEL, QUICKSTART, ROOT

from finetune import cli

GOOD_ROW = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
LINEAR = "down_proj, gate_proj, up_proj, k_proj, o_proj, q_proj, v_proj"

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


def test_9_all_together(recipe_file, capsys) -> None:
    text = RECIPE.replace("r: 8", "r: 0\n  lora_dropout: 1.5").replace("1e-4", "-1")
    text = stderr_of(["check", str(recipe_file(text))], 2, capsys)
    assert text.count("error:") == 3


@pytest.mark.parametrize(
    ("number", "content", "phrases"),
    [
        (17, b"", ["0 rows in", "rows.jsonl"]),
        (18, b"\n\n  \n", ["0 rows in", "rows.jsonl"]),
        (
            19,
            f"{GOOD_ROW}\n{GOOD_ROW}\n{{'messages': 1}}\n{GOOD_ROW}\n".encode(),
            ["rows.jsonl:3:2", "'messages'"],
        ),
        (20, f"{GOOD_ROW}\n{GOOD_ROW[:-30]}".encode(), ["rows.jsonl:2:", "looks cut off"]),
        (21, GOOD_ROW.encode() + b'\n{"prompt": "\xff"}', ["rows.jsonl:2", "not UTF-8"]),
        (25, b'{"instruction": "a", "output": "b"}', ["instruction, output", "messages"]),
        (27, GOOD_ROW.replace("assistant", "gpt").encode(), ["rows.jsonl:1, message 1", "gpt", "assistant"]),
        (30, GOOD_ROW.replace('"b"', "null").encode(), ["message 1", "content must be text"]),
        (
            35,
            GOOD_ROW.replace('"a"', f'"{"word " * 300}"').encode(),
            ["0 of 1 rows", "raise data.max_length"],
        ),
    ],
)
def test_data(number: int, content: bytes, phrases: list[str], recipe_file, tmp_path, capsys) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    path = recipe_file(
        RECIPE.replace("{data}", "rows.jsonl").replace("adapter:", "  max_length: 64\nadapter:")
    )
    assert cli.main(["train", str(path), f"train.output_dir={tmp_path / 'run'}", "--quiet"]) == 2
    text = capsys.readouterr().err
    assert all(phrase in text for phrase in phrases), text
    assert not (tmp_path / "run").exists(), "a run that never began leaves nothing behind"


def test_22_bom_and_crlf_are_fine(recipe_file, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + f"{GOOD_ROW}\r\n{GOOD_ROW}\r\n".encode())
    from finetune.data.load import read
    from finetune.recipe import load

    rows, _, _ = read(load(recipe_file(RECIPE.replace("{data}", "rows.jsonl"))).data, 0)
    assert [row.where.rpartition(":")[2] for row in rows] == ["1", "2"]


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
    from finetune.errors import UserError
    from finetune.recipe import Train
    from finetune.train import split_batch

    assert split_batch(Train(effective_batch_size=48), 2) == (48, 8, 3)
    assert split_batch(Train(effective_batch_size=6, per_device_train_batch_size=3), 2) == (6, 3, 1)
    with pytest.raises(UserError, match="8 or 12") as raised:
        split_batch(Train(effective_batch_size=10, per_device_train_batch_size=2), 2)
    assert raised.value.code == 2


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
        ('"{data}"', str(DATA.parent), ["no .jsonl or .json file in"]),
    ],
)
def test_more_of_what_check_sees(old: str, new: str, phrases: list[str], recipe_file, capsys) -> None:
    text = stderr_of(["check", str(recipe_file(RECIPE.replace(old, new)))], 2, capsys)
    assert all(phrase in text for phrase in phrases), text


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
