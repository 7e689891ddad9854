"""Weights whose shapes are not those of config.json are refused from the files' headers, before they load."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from finetune.core.errors import UserError
from finetune.preflight import checker
from finetune.recipe import loader
from support.paths import MODEL, QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize(
    ("key", "change"),
    [("hidden_size", 2), ("intermediate_size", 2), ("vocab_size", 2), ("num_key_value_heads", 2)],
)
def test_config_with_other_sizes_than_the_weights_is_refused(
    key: str, change: int, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config[key] *= change
    (folder / "config.json").write_text(json.dumps(config))
    recipe = loader.load(QUICKSTART, [f"model.name={folder}", f"adapter.type={kind}"])
    with pytest.raises(UserError) as refused:
        checker.check_without_examples(recipe)
    said = [one for one in refused.value.problems if "other shapes than its config.json" in one.what]
    assert said and "in the files" in said[0].found
