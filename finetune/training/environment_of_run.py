"""Describe the machine, the packages and the launch of a run, for environment.json."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

from finetune.autoconfig.launch_settings import Launch
from finetune.distributed import recorded_variables
from finetune.hardware.detection import Hardware
from finetune.run_folder import run_folder


def describe(hardware: Hardware, launch: Launch) -> dict[str, Any]:
    """Return versions, git revision, hardware and launch, which explain a run and help to repeat it."""
    return {
        "format_version": run_folder.FORMAT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": run_folder.packages(),
        "git": _git(),
        "hardware": asdict(hardware),
        "launch": {**asdict(launch), "environment": recorded_variables.recorded()},
    }


def _git() -> dict[str, Any] | None:
    """Return commit and dirty flag of the source tree, if this is a checkout and git is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
