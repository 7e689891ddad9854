"""The folder of a run's base model, of which `publish` reads the license and hashes the weights."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from finetune.cli import main
from finetune.core import regular_files
from finetune.export import base_model
from support.paths import MODEL

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def grow(path: Path) -> None:
    """Make a sparse file that is too large to read at once."""
    path.touch()
    os.truncate(path, regular_files.LARGEST + 1)


def longer_weights(folder: Path) -> None:
    """The hash of a sparse file of 900 GB takes hours."""
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size + 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "large license": lambda folder: grow(folder / "LICENSE"),
    "large card": lambda folder: grow(folder / "README.md"),
    "weights that end too late": longer_weights,
    "card elsewhere": lambda folder: (folder / "README.md").symlink_to(folder.parent / "secret"),
    "license elsewhere": lambda folder: (folder / "LICENSE").symlink_to(folder.parent / "secret"),
    "pipe": lambda folder: os.mkfifo(folder / "LICENSE"),
}

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.parametrize("damage", DAMAGE)
def test_publish_with_a_hostile_folder_of_the_base_model_is_refused(
    damage: str, trained, tmp_path, capsys
) -> None:
    (tmp_path / "secret").write_text("MIT License")
    base = shutil.copytree(MODEL, tmp_path / "model")
    words = ["publish", str(trained().path), "--dry-run", f"model.name={base}"]
    DAMAGE[damage](base)
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert str(base) in said and ("[unsafe-file]" in said or "[model-files]" in said)


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("license: mit\nlicense_link: https://a.org/LICENSE", {"license_link": "https://a.org/LICENSE"}),
        ("license: mit\nlicense_name: The a-1 (b) license", {"license_name": "The a-1 (b) license"}),
        ("license: mit\nlicense_link: javascript:alert(1)", {}),
        ('license: mit\nlicense_name: "a\\u202eb"\nlicense_link: "x\\n---\\n# b"', {}),
        ('license: "mit\\n---\\n<script>"', None),
        ("license: [mit]", None),
        ("license: !!python/name:os.system", None),
        ("license: &a mit\nother: *a", {}),
        (f"license: mit\n{BOMB}", None),
        ("license: " + "[" * 5000, None),
        ("license: 2020-99-99", None),
    ],
)  # fmt: skip
def test_card_of_a_base_model_gives_only_plain_texts(card: str, license: dict | None, tmp_path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
    found, source = base_model._license(tmp_path, None, None, online=False)
    if license is None:
        assert found == {"license": "other"} and not source
    else:
        assert found == {"license": "mit", **license}
