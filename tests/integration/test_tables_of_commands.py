"""The tables that commands print fit into 80 and 120 columns, and the commands that they print run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from finetune.cli import main
from support import tables
from support.paths import DATA, MODEL, QUICKSTART
from support.printed_commands import assert_commands_run, commands_in


def test_tables_of_recipes_fit_80_and_120_columns(capsys) -> None:
    tables.assert_tables_fit(lambda: main.main(["recipes"]))
    assert_commands_run(capsys.readouterr().out)


def test_tables_of_data_fit_80_and_120_columns(small, two_layers) -> None:
    words = ["data", str(QUICKSTART), *small, f"model.name={two_layers}", "data.packing=true", "--show", "0"]
    tables.assert_tables_fit(lambda: main.main(words))


def test_tables_of_train_fit_80_and_120_columns(small, two_layers, tmp_path, capsys) -> None:
    words = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", "train.max_steps=1", "--verbose"]
    words += ["train.warmup_steps=0", "eval.max_new_tokens=2", f"train.output_dir={tmp_path / 'run'}"]
    tables.assert_tables_fit(lambda: main.main(words), count=4)
    assert_commands_run(capsys.readouterr().out, least=4)


def test_init_prints_a_command_that_runs(tmp_path, capsys) -> None:
    recipe = str(tmp_path / "my recipe.yaml")
    given = ["--model", str(MODEL), "--data", str(DATA / "train.jsonl"), "--output", recipe]
    assert main.main(["init", *given]) == 0
    printed = capsys.readouterr().out
    assert_commands_run(printed)
    assert main.main(["check", *shlex.split(commands_in(printed)[-1])[2:]]) == 0
    assert "max_length: 512 #" in Path(recipe).read_text(), "the model has 512 positions"


@pytest.mark.parametrize("name, then", [("check", "data"), ("data", "plan"), ("plan", "train")])
def test_next_line_of_a_command_on_a_recipe_runs(name, then, small, two_layers, capsys) -> None:
    words = [str(QUICKSTART), *small, f"model.name={two_layers}"]
    assert main.main([name, *words]) == 0
    printed = capsys.readouterr().out
    assert_commands_run(printed)
    assert [shlex.split(command)[1:] for command in commands_in(printed)] == [[then, *words]]
    assert printed.splitlines()[-1].startswith("next, ")
    assert main.main([name, *words, "--json"]) == 0
    assert "next, " not in "".join(capsys.readouterr())


def test_next_line_of_a_plan_keeps_its_machine_and_its_launch(capsys) -> None:
    """A plan that does not fit names a change that fits."""
    given = ["--gpu", "l4", "--gpus", "2", "--accelerate", "ddp_2.yaml"]
    assert main.main(["plan", str(QUICKSTART), *given]) == 0
    assert commands_in(capsys.readouterr().out)[-1].endswith("--accelerate ddp_2.yaml")
    big = ["data.max_length=512", "train.per_device_train_batch_size=1024", "train.effective_batch_size=1024"]
    assert (
        main.main(["plan", str(QUICKSTART), *big, "speed.activation_checkpointing=none", "--gpu", "l4"]) == 0
    )
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    words = shlex.split(commands_in(printed)[-1])[1:]
    assert words[0] == "plan" and words[-2:] == ["--gpu", "l4"] and len(words) > len(big) + 5


def test_tables_of_a_finished_run_s_commands_fit_80_and_120_columns(trained, capsys) -> None:
    run = str(trained().path)
    tables.assert_tables_fit(lambda: main.main(["evaluate", run]))
    tables.assert_tables_fit(lambda: main.main(["publish", run, "--dry-run"]))
    staged = re.search(r"(\S+finetune-publish-\S+)", capsys.readouterr().out)
    assert staged
    shutil.rmtree(staged[1])
    tables.assert_tables_fit(lambda: main.main(["export", run, "--to", "vllm", "--adapter"]), count=2)
