"""Settings of matplotlib in the working directory, which may be a stranger's, and the user's own settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

from finetune.reporting import plots
from support.paths import ROOT

DRAW = "import sys; from finetune.reporting import plots; print(plots.scatter([], 'x', 'y'))"
TEX = "text.usetex: True\ntext.latex.preamble: \\input{/etc/passwd}\n"


def plant(kind: str, folder: Path) -> None:
    """Make a `matplotlibrc` that matplotlib must not read."""
    file = folder / "matplotlibrc"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes({"tex": TEX.encode(), "bytes": b"\xff\xfe", "key": b"a\x1b[1Aerror: b: 1\n"}[kind])


@pytest.mark.parametrize("kind", ["tex", "bytes", "key", "pipe", "endless"])
def test_settings_in_the_working_directory_are_not_read(kind: str, tmp_path) -> None:
    plant(kind, tmp_path)
    command = [sys.executable, "-P", "-c", DRAW]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == plots.scatter([], "x", "y").strip()


def test_settings_of_the_user_do_not_change_a_plot() -> None:
    before = plots.curves([plots.Curve("a", [1, 2], [3, 4])], "loss")
    mine = {"text.usetex": True, "axes.linewidth": 9, "lines.linestyle": ":", "axes.unicode_minus": False}
    with mpl.rc_context(mine):
        assert plots.curves([plots.Curve("a", [1, 2], [3, 4])], "loss") == before
        assert {name: mpl.rcParams[name] for name in mine} == mine
