"""A damaged validation.jsonl of a run is not evaluated on: finetune reads the data again, or refuses."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import Exit, UserError
from finetune.evaluation import reopen, validation_set
from finetune.run_folder import run_folder
from finetune.run_folder.run_folder import RunFolder


def read(run: RunFolder) -> tuple[list[list[int]], list[str]]:
    """The token ids of the validation set, and what is said of it."""
    rows, notes = validation_set.held_out(run, run_folder.recipe_of(run), reopen.tokenizer_of(run))
    return [document.ids for row in rows for document in row.documents], notes


@pytest.fixture
def run(train) -> Any:
    return train("eval.generate=false", "eval.samples=0")


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_validation_set_with_a_flipped_byte_is_read_from_the_data(run: RunFolder, count: int) -> None:
    path, draw, found = run.path / run_folder.HELD_OUT, random.Random(count), 0
    content, (whole, notes) = path.read_bytes(), read(run)
    assert not notes
    for offset in draw.sample(range(len(content)), count):
        held = bytearray(content)
        held[offset] ^= 1 << draw.randrange(8)
        path.write_bytes(held)
        ids, notes = read(run)
        assert ids == whole, offset
        found += bool(notes)
        if notes:
            assert "reads the validation set from the data again" in notes[0] and len(notes) == 1
            assert path.read_bytes() == content, "it is written anew"
            assert read(run) == (whole, [])
    assert found > count / 2, "the rest is in names of files, which no model sees"


def test_validation_set_with_an_example_less_is_read_from_the_data(run: RunFolder) -> None:
    path = run.path / run_folder.HELD_OUT
    whole, lines = read(run)[0], path.read_text().splitlines(keepends=True)
    for changed in (lines[:-1], lines[::-1], [*lines, lines[0]], []):
        path.write_text("".join(changed))
        ids, notes = read(run)
        assert ids == whole and len(notes) == 1


def test_training_examples_are_not_read_in_place_of_a_damaged_validation_set(train, small, tmp_path) -> None:
    """The two files of the data have changed places."""
    names, words = ("train", "test"), ["eval.generate=false", "eval.samples=0"]
    files = [Path(option.partition("=")[2]) for option in small]
    here = [shutil.copy(file, tmp_path / f"{name}.jsonl") for name, file in zip(names, files, strict=True)]
    run = train(*words, f"data.name={here[0]}", f"data.validation={here[1]}")
    (run.path / run_folder.HELD_OUT).unlink()
    for file, name in zip(files, names[::-1], strict=True):
        shutil.copy(file, tmp_path / f"{name}.jsonl")
    with pytest.raises(UserError, match="not those of the run"):
        read(run)


def test_damaged_validation_set_without_its_data_is_an_error(run: RunFolder, tmp_path) -> None:
    path = run.path / run_folder.HELD_OUT
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    text, gone = run.recipe.read_text(), str(tmp_path / "gone.jsonl")
    name = run_folder.recipe_of(run).data.validation
    run.recipe.write_text(text.replace(str(name), gone))
    with pytest.raises(UserError, match="its data is missing") as raised:
        read(run)
    assert raised.value.code == Exit.ARTIFACT and "data.validation=PATH" in str(raised.value)
