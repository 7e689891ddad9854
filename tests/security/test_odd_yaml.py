"""Text that PyYAML can't convert to values ends in an error or is ignored, whichever file it is in."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from finetune.cli import main
from finetune.core import errors, strict_yaml
from finetune.core.errors import UserError
from finetune.data import dataset_cards
from finetune.export import published_text
from finetune.launch import accelerate_config
from finetune.recipe import new_recipe, renames
from finetune.run_folder import settings_text
from support.paths import QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path

BASE: Any = SimpleNamespace(on_hub=False, name="llama")
ODD = [
    r'"\UFFFFFFFF"', r'"\U00110000"', r'"\q"', '"', "2020-99-99", "2001-12-14t21:59:43.10+99:99", "9" * 5000,
    "!!bool x", "!!int ''", "!!float x", "!!timestamp x", "!!binary 'a'", "!!python/object:os.system x", "*a",
    "{[a]: b}", "<<: 5", "[" * 5000, "0b2", "1:99:99", "\x00",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda text: ascii(text[:12]))
def test_yaml_that_has_no_value_is_no_bug(odd: str, tmp_path: Path, capsys) -> None:
    (config := tmp_path / "launch.yaml").write_text(f"num_processes: {odd}\n")
    with pytest.raises(UserError):
        accelerate_config.check(config)
    (card := tmp_path / "README.md").write_text(f"---\nconfigs: {odd}\n---\n")
    with pytest.raises(UserError, match=r"can't use .*, which lists"):
        dataset_cards.configs_of(card.parent, "data.name")
    old = next(iter(renames.KEYS))
    section, _, key = old.partition(".")
    assert settings_text.settings(f"{section}:\n  {key}: {odd}  # recipe\n", 1)
    resolved = f"{QUICKSTART.read_text()}\n# {odd}\n"
    assert published_text.recipe_without_paths(resolved, {"/home/me": "~"}, BASE)
    (recipe := tmp_path / "recipe.yaml").write_text(f"model: {odd}\n")
    assert main.main(["check", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "error:" in said and "internal-error" not in said and "library-error" not in said


@pytest.mark.parametrize(
    "line", ["a/" * 30_000, '\\"' * 30_000, "a." * 30_000 + "/", '"' * 30_000, "~/" * 30_000]
)
def test_long_comment_of_a_recipe_is_published_at_once(line: str) -> None:
    started = time.process_time()
    published_text.recipe_without_paths(f"# {line}\n", {"/home/me": "~"}, BASE)
    assert time.process_time() - started < 3


def test_comment_of_a_recipe_is_published_without_folders() -> None:
    text = (
        '# see ../mine/rows.jsonl and /home/me/x/rows.jsonl "/home/me/y/a.jsonl" or https://h.co/a/b.json\n'
    )
    clean = published_text.recipe_without_paths(text, {"/home/me/y": "y"}, BASE)
    assert clean.startswith("# see rows.jsonl and rows.jsonl "), clean
    assert "mine" not in clean and "/home/me" not in clean and "https://h.co/a/b.json" in clean


def test_aliases_of_an_accelerate_config_stay_small(tmp_path) -> None:
    lines = ["gpu_ids: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"fsdp_config: {{b: &a1 [{', '.join(['*a0'] * 10)}]}}"]
    lines += [f"tpu_config{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(2, 9)]
    (path := tmp_path / "launch.yaml").write_text("\n".join([*lines, "num_processes: *a8", ""]))
    started = time.process_time()
    with pytest.raises(UserError, match="the YAML is too large"):
        accelerate_config.read(path)
    path.write_text(f"num_processes: 0x{'f' * 5000}\n")
    with pytest.raises(UserError):
        accelerate_config.read(path)
    assert time.process_time() - started < 2


def test_many_unknown_keys_and_columns_are_explained_at_once(tmp_path, capsys) -> None:
    keys = "".join(f"  learning_rats{number}: 1\n" for number in range(4800))
    (path := tmp_path / "recipe.yaml").write_text(f"model: {{name: a}}\ntrain:\n{keys}")
    started = time.process_time()
    assert main.main(["check", str(path)]) == 2
    assert "more problems are not shown" in capsys.readouterr().err
    names = [f"{'n' * 180}{number}" for number in range(4000)]
    assert errors.nearest("n" * 180 + "x", names)
    said = str(errors.Problem("a column is missing", found=", ".join(names)))
    assert len(said) < 3000 and "more characters" in said
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", ["a\x85b", "a\x7fb", "a\ufffeb", "a\u2028b"])
def test_init_writes_a_name_that_yaml_reads_back(name: str, tmp_path) -> None:
    text = new_recipe._yaml(name)
    assert yaml.safe_load(text) == name
    (path := tmp_path / "a.yaml").write_text(f"model: {{name: {text}}}\n")
    assert strict_yaml.parse(path.read_text(), "a.yaml").value == {"model": {"name": name}}
