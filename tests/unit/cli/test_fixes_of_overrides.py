"""The fix of a problem has the form in which the user wrote the value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.cli import main
from support.paths import QUICKSTART

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_fix_of_an_override_is_an_override(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check", str(QUICKSTART), "data.max_length=abc"]) == 2
    assert "help:      data.max_length=1024\n" in capsys.readouterr().err


def test_fix_of_a_line_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name: m}\ndata: {name: d}\nadapter: {type: lroa}\n")
    assert main.main(["check", str(path)]) == 2
    assert "help:      type: lora\n" in capsys.readouterr().err
