"""One process for each GPU: a command that needs several replaces itself by `accelerate launch` of itself."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from finetune import shipped
from finetune.errors import Problem, UserError
from finetune.hardware import default_precision, detect


def launched() -> bool:
    """Whether `accelerate launch` or `torchrun` started this process."""
    return any(name in os.environ for name in ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"))


def if_needed(arguments: list[str], config: str | None = None) -> None:
    """Replace this process by `accelerate launch` where a config was named or several GPUs are visible.

    Args:
        arguments: of the `finetune` command, its name first.
        config: an accelerate config: a file, or the name of a shipped one.

    Raises:
        UserError: no such config (exit 2).
    """
    extra: list[str] = []
    if config is None:
        machine = detect()
        if machine.count < 2:
            return
        config = str(shipped.folder("accelerate_configs") / "ddp_8.yaml")
        extra = ["--num_processes", str(machine.count)]
        extra += ["--mixed_precision", default_precision(machine).value]
    if not Path(config).is_file():
        shelf = shipped.folder("accelerate_configs") / f"{Path(config).stem}.yaml"
        if not shelf.is_file():
            known = ", ".join(sorted(path.stem for path in shelf.parent.glob("*.yaml")))
            raise UserError(
                Problem("no such accelerate config", found=config, expected=f"a file, or one of {known}")
            )
        config = str(shelf)
    command = ["accelerate", "launch", "--config_file", config, *extra, "-m", "finetune", *arguments]
    print(shlex.join(command), flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *command[2:]])
