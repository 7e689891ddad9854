"""What a run folder says about the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.training import environment_of_run


def test_a_machine_without_git_records_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small container images have no git, and a checkout may be mounted into them."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(
        environment_of_run, "__file__", str(tmp_path / "finetune/training/environment_of_run.py")
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment_of_run._git() is None
