"""Run a program that tries regular expressions, which can't be interrupted, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

from finetune.core.errors import Exit, Problem, UserError

HANGS = (
    120  # seconds after which a process that does not end is killed; the patterns have less processor time
)


def first_slow(program: str, request: str, *options: str) -> int | None:
    """Return the number of the first pattern that takes too long, or `None`.

    Args:
        program: Python code. It prints the number of each pattern before it tries it, and limits its own
            processor time.
        request: the text on its standard input.
        options: options of Python in addition to `-I`.

    Raises:
        UserError: something other than a pattern ended or stopped the process (exit 3).
    """
    command = [sys.executable, "-I", *options, "-c", program]
    try:
        ended = subprocess.run(
            command, input=request, capture_output=True, text=True, check=False, timeout=HANGS
        )
    except subprocess.TimeoutExpired:
        raise _ended(f"it did not end within {HANGS} s") from None
    if not ended.returncode:
        return None
    begun = ended.stdout.split()
    if not begun or ended.returncode == -signal.SIGKILL:  # before a pattern, or as Linux does without memory
        raise _ended(f"it ended with status {ended.returncode}")
    return int(begun[-1])


def _ended(found: str) -> UserError:
    return UserError(
        Problem(
            "the process that tests regular expressions ended without a result",
            found=found,
            fix="close other programs and run the command again; `free -h` shows the memory",
            code="process-limit",
        ),
        code=Exit.ENVIRONMENT,
    )
