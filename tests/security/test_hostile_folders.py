"""Folders of data that a stranger made, and names that are no path: each ends with an error, soon."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune.cli import main
from finetune.core import folder_search
from finetune.experiments.runner import kept_runs
from finetune.recipe import loader
from support.paths import DATA, MODEL, QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Callable

EXAMPLE = '{"prompt": "a", "completion": "b"}\n'


def many_files(folder: Path) -> None:
    for number in range(folder_search.MOST_ENTRIES + 1):
        (folder / f"{number}.jsonl").touch()


def many_folders(folder: Path) -> None:
    for number in range(folder_search.MOST_ENTRIES + 1):
        (folder / str(number)).mkdir()


def card_with_aliases(folder: Path) -> None:
    """A name of 10^9 words."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    card = "\n".join(["---", *lines, "configs: [{config_name: *a8, data_files: a.jsonl}]", "---"])
    (folder / "README.md").write_text(card)
    (folder / "a.jsonl").write_text(EXAMPLE)


def nested_card(folder: Path) -> None:
    (folder / "README.md").write_text(f"---\nconfigs: {'[' * 100_000}\n---\n")
    (folder / "a.jsonl").write_text(EXAMPLE)


def many_splits(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["a"] * 10**6}))
    (folder / "a").mkdir()
    (folder / "a" / "state.json").write_text(json.dumps({"_data_files": []}))


def split_of_the_parent(folder: Path) -> None:
    """A split that leads out of the folder."""
    (folder.parent / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    (folder.parent / "a.arrow").touch()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [".."]}))


REFUSED: list[Callable[[Path], None]] = [many_files, many_folders, many_splits, split_of_the_parent]


@pytest.mark.parametrize("make", REFUSED)
def test_folder_that_holds_too_much_or_leads_out_is_refused(make, tmp_path, commands) -> None:
    (folder := tmp_path / "data").mkdir()
    make(folder)
    ended = commands.run("check", str(QUICKSTART), f"data.name={folder}")
    assert not ended.wrong and ended.code == 2, ended


@pytest.mark.parametrize("command", ["check", "data"])
def test_file_whose_name_is_not_utf_8_is_refused(command: str, tmp_path, commands) -> None:
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text(EXAMPLE)
    ended = commands.run(command, str(QUICKSTART), f"data.name={tmp_path}")
    assert not ended.wrong and ended.code == 2 and "not UTF-8" in ended.said, ended


@pytest.mark.parametrize("make", [card_with_aliases, nested_card])
def test_card_that_grows_or_nests_is_refused(make, tmp_path, commands) -> None:
    (folder := tmp_path / "data").mkdir()
    make(folder)
    ended = commands.run("check", str(QUICKSTART), f"data.name={folder}")
    assert not ended.wrong and ended.code == 2 and "which lists the files" in ended.said, ended


@pytest.mark.parametrize("name", ["state.json", "dataset_dict.json", "README.md"])
@pytest.mark.parametrize("kind", ["pipe", "socket", "sparse"])
def test_manifest_that_is_no_regular_file_is_refused(name: str, kind: str, tmp_path, commands) -> None:
    (tmp_path / "a.jsonl").write_text(EXAMPLE)
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        with path.open("wb") as file:
            file.truncate(10**10)
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path}")
    assert not ended.wrong and ended.code == 2 and name in ended.said, ended


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/*/*/*.jsonl", "*.jsonl"])
def test_pattern_over_too_many_entries_is_refused(pattern: str, tmp_path, commands) -> None:
    for number in range(100):
        for inner in range(220):
            (tmp_path / str(number) / str(inner)).mkdir(parents=True)
    many_files(tmp_path) if "/" not in pattern else None
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path}/{pattern}")
    assert not ended.wrong and ended.code == 2, ended


def test_pattern_with_many_parts_is_refused_or_followed_once_for_each_match(tmp_path, commands) -> None:
    for number in range(3000):
        (tmp_path / "d" / str(number)).mkdir(parents=True)
    for parts in (40, 650):
        name = f"{tmp_path}/d/*/{'../0/' * parts}x.jsonl"
        ended = commands.run("check", str(QUICKSTART), f"data.name={name}")
        assert not ended.wrong and ended.code == 2, ended


def test_card_with_many_patterns_is_one_search(tmp_path, commands) -> None:
    for number in range(2000):
        (tmp_path / f"f{number}.jsonl").touch()
    paths = "".join(f"    - f*{number}.jsonl\n" for number in range(5000))
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path:\n{paths}---\n"
    )
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path}")
    assert not ended.wrong and ended.code == 2, ended


FOLDERS = ("/", "/proc", "/sys", "/**/*.jsonl", "/dev")
OF_THE_SYSTEM = [(key, name) for key in ("data.name", "data.validation") for name in FOLDERS]


@pytest.mark.parametrize(
    ("key", "name"), soak_except([*OF_THE_SYSTEM[:5], ("data.validation", "/sys")], OF_THE_SYSTEM)
)
def test_folder_of_the_system_is_refused(key: str, name: str, commands) -> None:
    ended = commands.run("check", str(QUICKSTART), f"{key}={name}")
    assert not ended.wrong and ended.code == 2, ended


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_folder_that_cannot_be_read_is_named(tmp_path, commands) -> None:
    (tmp_path / "a.jsonl").write_text(EXAMPLE)
    (tmp_path / "closed").mkdir(mode=0)
    ended = commands.run("check", str(QUICKSTART), f"data.name={tmp_path}")
    assert not ended.wrong and ended.code == 2 and "closed" in ended.said, ended


KEYS = ("data.name", "data.validation", "eval.forgetting", "eval.tasks", "model.name", "adapter.init_from",
        "data.chat_template", "train.output_dir", "data.cache_dir")  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000, "a\\0b"])
def test_name_that_is_too_long_for_a_path_is_refused(key: str, name: str, commands) -> None:
    value = f'["{name}"]' if key == "eval.tasks" else f'"{name}"'
    ended = commands.run("check", str(QUICKSTART), f"{key}={value}")
    assert not ended.wrong and ended.code == 2 and key in ended.said, ended


def deep(folder: Path, levels: int, branches: int = 1) -> None:
    """Nested folders, made from the inside, because paths have a limit."""
    for branch in range(branches):
        here = os.open(folder, os.O_RDONLY)
        for level in range(levels):
            name = f"{branch}d" if level == 0 else "d"
            os.mkdir(name, dir_fd=here)
            below = os.open(name, os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        os.close(here)


@pytest.mark.parametrize("pattern", ["", "**/*.jsonl"])
def test_deeply_nested_data_is_refused_at_once(pattern: str, tmp_path, commands) -> None:
    (folder := tmp_path / "data").mkdir()
    deep(folder, 300, branches=4)
    ended = commands.run("check", str(QUICKSTART), f"data.name={folder}/{pattern}")
    assert not ended.wrong and ended.code == 2, ended
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_run_with_deeply_nested_folders_is_refused(trained, capsys) -> None:
    run = trained().path
    deep(run, 1200)
    for command in (
        ["merge"],
        ["publish", "--dry-run"],
        ["chat", "--prompt", "a"],
        ["export", "--to", "vllm"],
    ):
        assert main.main([command[0], str(run), *command[1:]]) == 2
        assert "nested too deeply" in capsys.readouterr().err
    subprocess.run(["rm", "-rf", str(run)], check=True)


@pytest.mark.parametrize("command", ["profile", "ablate", "sweep"])
def test_link_in_place_of_a_commands_folder_is_not_followed(
    command: str, tmp_path, monkeypatch, capsys
) -> None:
    (tmp_path / "runs").mkdir()
    (victim := tmp_path / "victim").mkdir()
    (victim / "trace.json").write_text("mine")
    shutil.copy(QUICKSTART, tmp_path / "r.yaml")
    (tmp_path / "space.yaml").write_text("space: {adapter.r: {low: 4, high: 64}}\n")
    (tmp_path / "runs" / f"{command}-r").symlink_to(victim)
    monkeypatch.chdir(tmp_path)
    more = ["--space", "space.yaml"] if command == "sweep" else []
    options = [f"model.name={MODEL}", f"data.name={DATA / 'train.jsonl'}", "data.validation_fraction=0.1"]
    assert main.main([command, "r.yaml", *more, *options, "data.validation=null"]) == 2
    assert "link" in capsys.readouterr().err
    assert [path.name for path in victim.iterdir()] == ["trace.json"]
    assert (victim / "trace.json").read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["a #b", "a: b", "~", "{x}", "[x]", "&x", "!x", "x*", "123", "null", "a'b", "- a"]
)
def test_any_name_of_a_folder_is_the_folder_of_a_run(name: str, tmp_path, monkeypatch) -> None:
    """Experiments give their runs an override, which is YAML."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (Path(name), Path(name) / "lora-seed42", tmp_path / name):
        recipe = loader.load(QUICKSTART, [kept_runs.in_folder(folder)])
        assert os.path.abspath(recipe.train.output_dir or "") == os.path.abspath(folder)


@pytest.mark.parametrize("name", ["a #b", "~"])
def test_compare_writes_into_its_folder_under_any_name(
    name: str, two_layers, small, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"model.name={two_layers}", *small, "train.max_steps=2", "train.effective_batch_size=8"]
    words += ["eval.generate=false", "eval.forgetting=false", "--quiet", "--output", name]
    assert main.main(["compare", str(QUICKSTART), "--adapters", "lora", *words]) == 0
    assert (tmp_path / name / "lora-seed42" / "adapter").is_dir()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("a", "~"))] == [name]


def test_name_of_a_recipe_leads_no_results_out_of_their_folder(tmp_path, monkeypatch, capsys) -> None:
    shutil.copy(QUICKSTART, tmp_path / "...yaml")  # `..` before the ending
    (tmp_path / "best.yaml").write_text("mine")
    monkeypatch.chdir(tmp_path)
    words = [f"model.name={MODEL}", f"data.name={DATA / 'train.jsonl'}", "data.validation=null"]
    assert main.main(["ablate", "...yaml", *words, "--output", "results"]) == 2
    assert "rename the recipe" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["...yaml", "best.yaml"]
