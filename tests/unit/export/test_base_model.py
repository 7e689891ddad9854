"""What is said of the base of a published run: its name, and whose license it has."""

from pathlib import Path

import pytest

from finetune.export import base_model
from finetune.recipe import loader


def found(written: Path, *overrides: str, online: bool = False) -> base_model.Base:
    loaded = loader.load(written, overrides)
    return base_model.find(loaded.model, loaded.publish, {"revision": None}, online=online)


@pytest.mark.parametrize(
    ("file", "text", "license"),
    [
        ("README.md", "---\nlicense: llama3.1\nlicense_name: llama\n---\n# Base\n", "llama3.1"),
        ("README.md", "---\nlicense: [broken\n---\n", "other"),
        ("README.md", "no metadata\n", "other"),
        ("LICENSE", "\n    Apache License\n    Version 2.0, January 2004\n", "apache-2.0"),
        ("LICENSE", "MIT License\n\nCopyright\n", "mit"),
        ("LICENSE", "A license of our own\n", "other"),
    ],
)
def test_the_license_is_the_base_s(file: str, text: str, license: str, tmp_path: Path, recipe_file) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / file).write_text(text)
    written = recipe_file(
        f"model: {{name: '{folder}'}}\ndata: {{name: '{{data}}'}}\nadapter: {{type: lora}}\n"
    )
    base = found(written)
    assert base.license["license"] == license and bool(base.license_from) == (license != "other")
    assert not base.on_hub and base.name == "base"
    base = found(written, "publish.license=cc-by-4.0", "publish.base_model=org/base")
    assert base.license == {"license": "cc-by-4.0"} and (base.name, base.on_hub) == ("org/base", True)


def test_the_license_of_a_base_on_the_hub(hub, recipe_file) -> None:
    hub.add("org/base", private=False, **{"README.md": b"---\nlicense: llama3.1\n---\n"})
    written = recipe_file("model: {name: org/base}\ndata: {name: '{data}'}\nadapter: {type: lora}\n")
    base = found(written, online=True)
    assert base.license == {"license": "llama3.1"} and base.license_from == "the card of org/base"
    assert found(written, "model.name=org/none", online=True).license == {"license": "other"}
