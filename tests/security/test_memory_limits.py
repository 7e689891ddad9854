"""A run that its control group kills, because memory ran out, resumes to the same weights."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from finetune.cli import main
from finetune.run_folder.run_folder import RunFolder
from support.paths import QUICKSTART, ROOT
from support.runs import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS = Path("/sys/fs/cgroup")
LIMIT = {"memory": "memory.limit_in_bytes", "": "memory.max"}  # by controller folder: cgroup v1, v2
USED = {"memory": "memory.usage_in_bytes", "": "memory.current"}
STEPS = 60
# A process that the kernel does not kill, and that fills the memory of its group
NEIGHBOR = """
open("/proc/self/oom_score_adj", "w").write("-1000")
rows = []
while True:
    rows.append(b"1" * 2**20)
"""


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """A new control group with the files of its limit and of its used bytes."""
    version = "memory" if (GROUPS / "memory").is_dir() else ""
    folder = GROUPS / version / f"finetune-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be created here: {error}")
    if not (folder / LIMIT[version]).exists():
        folder.rmdir()
        pytest.skip("control groups have no memory controller here")
    yield folder / LIMIT[version], folder / USED[version]
    folder.rmdir()


@pytest.mark.soak
def test_a_run_that_its_memory_limit_kills_resumes_to_the_same_weights(group, small, tmp_path: Path) -> None:
    limit, used = group
    given = [*small, f"train.max_steps={STEPS}", "train.save_steps=2", "eval.forgetting=false"]
    given += ["train.learning_rate=1e-3", "train.warmup_steps=0"]
    killed, whole = (RunFolder(tmp_path / name) for name in ("killed", "whole"))
    words = ["train", str(QUICKSTART), *given]
    child = start_in(limit.parent, ["-m", "finetune", *words, f"train.output_dir={killed.path}", "--quiet"])
    while child.poll() is None and not (killed.path / "metrics.jsonl").exists():
        time.sleep(0.05)
    while child.poll() is None and len(metrics(killed)) < 5:
        time.sleep(0.05)
    limit.write_text(str(int(used.read_text()) + 2**25))
    neighbor = start_in(limit.parent, ["-c", NEIGHBOR])  # takes the rest, as another process of a container
    try:
        assert child.wait(60) == -signal.SIGKILL
    finally:
        neighbor.kill()
        neighbor.wait()
    assert len(metrics(killed)) < STEPS and any((killed.path / "checkpoints").iterdir())
    assert main.main([*words, f"train.output_dir={killed.path}", "--resume", "--quiet"]) == 0
    assert main.main([*words, f"train.output_dir={whole.path}", "--quiet"]) == 0
    name = "adapter_model.safetensors"
    assert (killed.adapter / name).read_bytes() == (whole.adapter / name).read_bytes()


def start_in(group: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """Start Python in a control group."""
    joins = f"echo $$ > {group / 'cgroup.procs'}; exec "
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["sh", "-c", joins + shlex.join([sys.executable, *words])], cwd=ROOT, env=environment
    )
