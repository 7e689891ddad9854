"""Changed configs of other tools: `finetune import` translates them or refuses them with a message."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from finetune.cli import main
from finetune.core import foreign_yaml, strict_yaml
from finetune.core.errors import UserError
from finetune.importers import recipe_text
from support import mutated_imports
from support.limited_commands import LimitedCommands
from support.paths import MODEL
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT, PARTS = 1000, 50


@pytest.fixture(scope="module")
def commands() -> Iterator[LimitedCommands]:
    with LimitedCommands("finetune.importers.reading", "finetune.importers.recipe_text") as running:
        yield running


@pytest.mark.parametrize("part", soak_except([0], range(PARTS)))
def test_mutated_config_of_another_tool_is_imported_or_refused(part: int, tmp_path, commands) -> None:
    codes, recipe = Counter[int](), tmp_path / "recipe.yaml"
    os.mkfifo(tmp_path / "pipe.yaml")
    for seed in range(part, COUNT, PARTS):
        options = mutated_imports.write(seed, tmp_path)
        ended = commands.run("import", str(tmp_path / "config"), "--output", str(recipe), *options)
        assert not ended.wrong, f"seed {seed}: {ended}"
        codes[ended.code] += 1
        if not ended.code:
            check_recipe(recipe.read_text(encoding="utf-8"), seed)
            recipe.unlink()
        assert set(os.listdir(tmp_path)) <= {"config", "theirs.yaml", "pipe.yaml", "data"}, seed
    assert set(codes) == {0, 2}, codes


@pytest.mark.parametrize("sign", ["\\uffff", "\\ufffe", "\\x85", "\\u2028", "\\U0001ffff", "\\e", "\\0"])
def test_imported_recipe_holds_no_character_that_yaml_refuses(sign: str, tmp_path) -> None:
    config, recipe = tmp_path / "theirs.yaml", tmp_path / "recipe.yaml"
    lines = [
        "base_model: a/b",
        f'datasets: [{{path: "c/d{sign}", type: alpaca}}]',
        f'run_name: "{sign}"',
        f'odd: "{sign}"',
    ]
    config.write_text("\n".join([*lines, "micro_batch_size: 1"]))
    assert main.main(["import", str(config), "--output", str(recipe)]) == 0
    check_recipe(recipe.read_text(encoding="utf-8"), 0)


ODD_CHATS = {
    "no messages": [],
    "no list": "hello",
    "other content": [{"role": "user", "content": {"a": [1]}}, {"role": "assistant", "content": 5}],
    "no content": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}],
    "no role": [{"content": "a"}],
}


@pytest.mark.parametrize("odd", ODD_CHATS)
def test_odd_example_of_a_verified_batch_is_named(odd: str, tmp_path, capsys) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": turns}, {"messages": ODD_CHATS[odd]}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = [f"model_name_or_path: {MODEL}", f"dataset_name: {tmp_path / 'rows.jsonl'}", "use_peft: true"]
    config = tmp_path / "sft.yaml"
    config.write_text("\n".join([*lines, "max_length: 64", "per_device_train_batch_size: 2"]))
    output = str(tmp_path / "recipe.yaml")
    assert main.main(["import", str(config), "--from", "trl", "--verify", "--output", output]) == 0
    said = capsys.readouterr().out
    assert "verify: 0 of the first 2 examples" in said and "finetune does not accept the example" in said


def check_recipe(text: str, seed: int) -> None:
    """The text has the sections of a recipe and nothing that a value forged."""
    document = strict_yaml.parse(text, "recipe.yaml")
    assert not document.problems and set(document.value) <= set(recipe_text.SECTIONS), seed
    assert "evil/exfil" not in str(document.value.get("publish")) or "hub_model_id" in text, seed
    assert text.isprintable() or all(sign == "\n" or sign.isprintable() for sign in text), seed
    assert "hf_abcdefghijklmnopqrstuv" not in text, seed


@pytest.mark.parametrize("text", mutated_imports.TEXTS[:6])
def test_foreign_yaml_that_expands_or_nests_too_much_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"too large|too deeply|no value before|not valid"):
        foreign_yaml.read(text, "a.yaml")


SETTINGS = "base_model: a/b\ndatasets: [{path: c/d, type: alpaca}]\n"
LONG = {
    "empty lines": SETTINGS + "\n" * 250_000,
    "a mapping": f"{SETTINGS}odd: {{{', '.join(map(str, range(35_000)))}}}\n",
    "keys": SETTINGS + "".join(f"k{number}: 1\n" for number in range(25_000)),
    "tokens": f"{SETTINGS}tokens: [{', '.join(f'a{number}' for number in range(30_000))}]\n",
    "a text in place of a list": f"{SETTINGS}eot_tokens: {'x' * 250_000}\n",
    "datasets": "base_model: a/b\ndatasets:\n"
    + "".join(f"- {{path: c/d{n}, type: alpaca, roles: {{user: [u{n}]}}}}\n" for n in range(4_000)),
}


@pytest.mark.parametrize("kind", LONG)
def test_config_of_another_tool_with_many_values_ends_soon(kind: str, tmp_path, commands) -> None:
    (tmp_path / "config").write_text(LONG[kind])
    ended = commands.run("import", str(tmp_path / "config"), "--output", str(tmp_path / "recipe.yaml"))
    assert not ended.wrong, ended


def test_foreign_yaml_with_anchors_and_merge_keys_is_read() -> None:
    text = "base: &b {r: 1}\nother: {<<: *b, s: 2.0e-5}\nday: 2020-01-01\n"
    assert foreign_yaml.read(text, "a.yaml") == {
        "base": {"r": 1},
        "other": {"r": 1, "s": 2.0e-5},
        "day": "2020-01-01",
    }


def test_import_writes_through_no_link(tmp_path: Path, capsys) -> None:
    mutated_imports.write(0, tmp_path)
    (tmp_path / "config").write_text("model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\n")
    (tmp_path / "recipe.yaml").symlink_to(tmp_path / "victim")
    words = ["import", str(tmp_path / "config"), "--output", str(tmp_path / "recipe.yaml")]
    assert main.main(words) == 2
    assert not (tmp_path / "victim").exists()
