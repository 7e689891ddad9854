"""Commands in messages run as printed, wherever finetune is installed."""

import shlex
import subprocess
import sys
from pathlib import Path

from finetune.core import command_lines


def test_command_of_an_installation_outside_path_has_its_path(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command_lines.program.cache_clear()
    try:
        line = command_lines.command("recipes", "a name")
        (tmp_path / "finetune").write_text("#!/bin/sh\nexit 9\n")  # another program of this name
        (tmp_path / "finetune").chmod(0o755)
        command_lines.program.cache_clear()
        assert command_lines.command("recipes", "a name") == line
    finally:
        command_lines.program.cache_clear()
    assert shlex.split(line)[-2:] == ["recipes", "a name"] and Path(shlex.split(line)[0]).is_absolute()
    printed = subprocess.run(
        [*shlex.split(line)[:-2], "--version"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.startswith("finetune ")


def test_command_of_an_installation_on_path_is_its_name(monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    command_lines.program.cache_clear()
    try:
        assert command_lines.command("train", "quickstart") == "finetune train quickstart"
    finally:
        command_lines.program.cache_clear()
