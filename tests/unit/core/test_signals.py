"""Ctrl-C in a process that finetune starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from finetune.core import signals

MODULE = """
import multiprocessing, os, signal
if multiprocessing.parent_process() and {at_import}:
    os.kill(os.getpid(), signal.SIGINT)
def work():
    os.kill(os.getpid(), signal.SIGINT)
"""
PROGRAM = """
if __name__ == "__main__":
    import works
    from concurrent.futures.process import BrokenProcessPool
    from finetune.core import signals
    try:
        signals.in_new_process(works.work)
    except BrokenProcessPool:
        print("ended")
"""


@pytest.mark.parametrize("at_import", [True, False])
def test_ctrl_c_in_a_new_process_prints_no_traceback(at_import: bool, tmp_path: Path) -> None:
    (tmp_path / "works.py").write_text(MODULE.format(at_import=at_import))
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_a_new_process_returns_its_result_or_raises_its_error() -> None:
    assert signals.in_new_process(sum, [1, 2]) == 3
    with pytest.raises(ValueError, match="invalid literal"):
        signals.in_new_process(int, "x")
