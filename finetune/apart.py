"""The end of a run whose base no single GPU holds: one process evaluates on all of them, the others wait."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from finetune import ranks, verify
from finetune.errors import Exit, Problem, UserError

if TYPE_CHECKING:
    from finetune.receipts import Ledger
    from finetune.run_folder import RunFolder

# What a launcher sets for its processes; one that is to be alone must not see it
_LAUNCHERS = re.compile(
    "(ACCELERATE|FSDP|PARALLELISM|TORCHELASTIC|TORCH_NCCL|LOCAL|GROUP|ROLE|MASTER)_.*|RANK|WORLD_SIZE"
)


def evaluate(folder: RunFolder, live: verify.Live, ledger: Ledger) -> dict[str, Any]:
    """The content of eval.json. What was saved is compared with what was trained from the file alone.

    Raises:
        UserError: the file is not what was trained, or does not open, and is moved aside (exit 4); the
            evaluation's own failure.
    """
    if ranks.main():
        verify.add_saved_receipts(live, folder, ledger)
        verify.check(folder, ledger)
        line = [sys.executable, "-m", "finetune", "evaluate", str(folder.path), "--quiet"]
        done = subprocess.run(line, env=alone(), capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())[-500:]
            fix = f"finetune evaluate {folder.path}; what was trained is saved"
            problem = Problem("what was saved can't be evaluated", found=said, fix=fix)
            if done.returncode == Exit.ARTEFACT:
                problem = Problem("what was saved does not open", where=str(folder.weights), found=said)
                verify.set_aside(folder)
            raise UserError(problem, code=Exit.of(done.returncode))
    ranks.wait()
    ranks.appears(folder.path / "eval.json")
    return folder.read("eval.json")


def alone() -> dict[str, str]:
    """The environment of a process outside this launch."""
    return {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}
