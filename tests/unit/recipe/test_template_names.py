"""A bundled template is found by its name, whatever folders stand beside the recipe."""

from pathlib import Path

import pytest

from finetune.data import chat_templates
from finetune.recipe import loader
from support.paths import MODEL


def template_of(folder: Path, name: str) -> str:
    text = f"model: {{name: '{MODEL}'}}\ndata: {{name: rows.jsonl, chat_template: {name}}}\n"
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "recipe.yaml").write_text(text + "adapter: {type: lora}\n")
    return loader.load(folder / "recipe.yaml").data.chat_template or ""


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("name", chat_templates.bundled())
def test_chat_template_folder_of_its_name_does_not_hide_it(
    name: str, elsewhere: bool, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere" if elsewhere else tmp_path)
    assert chat_templates.read_template(template_of(tmp_path, name)) == chat_templates.bundled()[name]


def test_chat_template_file_beside_the_recipe_is_read(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert chat_templates.read_template(template_of(tmp_path, "own.jinja")) == "{{ messages }}"
