"""Folders that a library fills are published with the permissions of the user's umask."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from finetune.core import safe_files


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_published_weights_have_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    """safetensors writes files that only their owner can read, whatever the umask is."""
    before = os.umask(umask)
    try:
        with safe_files.replace_folder(tmp_path, "adapter") as private:
            (private / "inner").mkdir()
            for folder in (private, private / "inner"):
                save_file({"weight": torch.zeros(2)}, folder / "weights.safetensors")
                (folder / "config.json").write_text("{}")
            (private / "link").symlink_to(tmp_path / "absent")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "adapter").rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
