"""Changed files of a model: `check` accepts or refuses them with a message, soon and in little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import damaged_runs
from support.limited_commands import LimitedCommands
from support.paths import MODEL, QUICKSTART
from support.soak import soak_except

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNT, BLOCK = 2000, 5
NEEDED_ANYWAY = ("pyarrow.parquet", "tokenizers", "torch", "transformers.models.llama.modeling_llama", "peft")


@pytest.fixture(scope="module")
def commands() -> Iterator[LimitedCommands]:
    with LimitedCommands(*NEEDED_ANYWAY) as running:
        yield running


def copied(folder: Path) -> Path:
    """A copy of the model; its weights are the same file."""
    folder.mkdir()
    for file in MODEL.iterdir():
        (os.link if file.suffix == ".safetensors" else shutil.copy)(file, folder / file.name)
    return folder


def checked(folder: Path, small: tuple[str, str], commands: LimitedCommands, what: str) -> int:
    ended = commands.run("check", str(QUICKSTART), f"model.name={folder}", *small)
    assert not ended.wrong and ended.code in (0, 2, 3), (what, ended)
    return ended.code


@pytest.mark.parametrize("block", soak_except([0], range(COUNT // BLOCK)))
def test_mutated_model_file_is_accepted_or_refused(block: int, small, tmp_path, commands) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        chance = random.Random(seed)
        folder = copied(tmp_path / str(seed))
        names = sorted(file.name for file in folder.iterdir() if file.suffix in (".json", ".jinja"))
        names += ["config.json"] * len(names)
        file = folder / chance.choice(names)
        damage = chance.choice([damaged_runs.change_value] * 4 + [damaged_runs.change_bytes])
        what = f"seed {seed}: {file.name}: {damage(file, folder, chance, tmp_path)}"
        checked(folder, small, commands, what)
        shutil.rmtree(folder)


ODD = [
    ("config.json", "architectures", [1]),
    ("config.json", "architectures", {"a": 1}),
    ("config.json", "model_type", {"a": 1}),
    ("config.json", "vocab_size", ["a"]),
    ("config.json", "max_position_embeddings", {"a": 1}),
    *(("config.json", section, "x") for section in ("text_config", "decoder", "generator", "text_encoder")),
    ("generation_config.json", "", b"[1]"),
    ("generation_config.json", "", b"\xff\xfe{}"),
    ("generation_config.json", "", b"[" * 1000 + b"]" * 1000),
]


@pytest.mark.parametrize(("name", "key", "value"), ODD)
def test_model_file_with_a_value_of_another_type_is_refused(
    name: str, key: str, value: object, small, tmp_path, commands
) -> None:
    file = copied(tmp_path / "model") / name
    if isinstance(value, bytes):
        file.write_bytes(value)
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert checked(file.parent, small, commands, name) == 2
