"""The message of a command for input that it does not accept."""

from __future__ import annotations

from pathlib import Path

from finetune.cli import main
from support.paths import QUICKSTART


def refused(name: str | Path, capsys, *, says: tuple[str, ...], key: str = "model.name") -> None:
    """`finetune check` ends with 2 and says what and where."""
    assert main.main(["check", str(QUICKSTART), f"{key}={name}"]) == 2
    error = capsys.readouterr().err
    assert all(text in error for text in (key, *says)), error
