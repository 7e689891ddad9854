"""Names of models from strangers: one check for all of them, and one commit for each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from finetune.cli import main
from finetune.core.errors import UserError
from finetune.export import export_source
from finetune.models import model_files
from finetune.recipe.schema import Model
from support.hub_server import Hub, Repo
from support.paths import MODEL, QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.export.export_source import Source

ODD = [
    "a--b/c",
    "org/..",
    "-org/name",
    "org/na me",
    "org/name.",
    "o" * 97,
    "org/\u202ename",
    "a,b/c",
    "a?b=c",
]


def base_of(adapter: Path, **values: Any) -> Source:
    """An adapter of PEFT, without a tokenizer, with another base model."""
    for file in adapter.glob("tokenizer*"):
        file.unlink()
    config = json.loads((adapter / "adapter_config.json").read_text()) | values
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return export_source.open_source(adapter)


@pytest.mark.parametrize("name", ODD)
def test_name_that_no_model_has_is_refused_wherever_it_stands(
    name: str, saved_lora, no_network, capsys
) -> None:
    given = f"model.name={json.dumps(name)}"
    for words in (["check", str(QUICKSTART), given], ["plan", str(QUICKSTART), given]):
        assert main.main(words) == 2, words
        assert "model.name" in capsys.readouterr().err
    with pytest.raises(UserError) as raised:
        model_files.check_exists(Model(name=name))
    assert raised.value.code == 2
    with pytest.raises(UserError) as raised:
        export_source.recipe_of(base_of(saved_lora, base_model_name_or_path=name), ())
    assert raised.value.code == 2 and not no_network


def test_base_model_of_an_adapter_is_read_at_one_commit(hub: Hub, saved_lora) -> None:
    """A branch may move between the config, the tokenizer and the weights."""
    files = {file.name: file.read_bytes() for file in MODEL.iterdir()}
    repo = hub.repos["me/base"] = Repo(private=False)
    commit = repo.commit("main", files, "first")
    for revision in (None, "main", commit):
        source = base_of(saved_lora, base_model_name_or_path="me/base", revision=revision)
        assert export_source.recipe_of(source, ()).model.revision == commit
        repo.commit("main", {**files, "README.md": b"moved"}, "second")
