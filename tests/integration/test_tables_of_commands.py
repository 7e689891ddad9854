"""The tables that commands print fit into 80 and 120 columns."""

from __future__ import annotations

import re
import shutil

from finetune.cli import main
from support import tables
from support.paths import QUICKSTART


def test_tables_of_recipes_fit_80_and_120_columns() -> None:
    tables.assert_tables_fit(lambda: main.main(["recipes"]))


def test_tables_of_data_fit_80_and_120_columns(small, two_layers) -> None:
    words = ["data", str(QUICKSTART), *small, f"model.name={two_layers}", "data.packing=true", "--show", "0"]
    tables.assert_tables_fit(lambda: main.main(words))


def test_tables_of_train_fit_80_and_120_columns(small, two_layers, tmp_path) -> None:
    words = ["train", str(QUICKSTART), *small, f"model.name={two_layers}", "train.max_steps=1", "--verbose"]
    words += ["train.warmup_steps=0", "eval.max_new_tokens=2", f"train.output_dir={tmp_path / 'run'}"]
    tables.assert_tables_fit(lambda: main.main(words), count=4)


def test_tables_of_a_finished_run_s_commands_fit_80_and_120_columns(trained, capsys) -> None:
    run = str(trained().path)
    tables.assert_tables_fit(lambda: main.main(["evaluate", run]))
    tables.assert_tables_fit(lambda: main.main(["publish", run, "--dry-run"]))
    staged = re.search(r"(\S+finetune-publish-\S+)", capsys.readouterr().out)
    assert staged
    shutil.rmtree(staged[1])
    tables.assert_tables_fit(lambda: main.main(["export", run, "--to", "vllm", "--adapter"]), count=2)
