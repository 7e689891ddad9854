"""What a run folder says about the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.training import resolved_recipe


def test_a_machine_without_git_records_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small container images have no git, and a checkout may be mounted into them."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(resolved_recipe, "__file__", str(tmp_path / "finetune/training/resolved_recipe.py"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resolved_recipe._git() is None
