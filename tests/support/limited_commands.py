"""Run commands with limits of time and memory, each in a process forked from a server that has run a check.

with LimitedCommands() as commands:
    ended = commands.run("check", "recipe.yaml")
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

SECONDS, BYTES = 5.0, 2 * 2**30
ON_THE_WALL = 6 * SECONDS  # other tests run in parallel; a command that waits uses no CPU time
ROOT = Path(__file__).resolve().parents[2]
HUNG = -1000  # in place of an exit code


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Its exit code; `HUNG`; minus the number of the signal that ended it."""
    said: str
    seconds: float
    """Wall clock, of which a busy machine gives little: `HUNG` counts the processor's time too."""
    bytes: int
    """Peak memory without the memory of the imports."""

    @property
    def wrong(self) -> str:
        """Why a stranger's input ended badly; the empty string: it was accepted or refused with a message."""
        if self.code == HUNG:
            return f"hung ({self.seconds:.0f} s)"
        if self.code < 0:
            return f"ended by signal {-self.code}"
        if "Traceback (most recent call last)" in self.said:
            return "a traceback"
        for words in ("bug of finetune", "MemoryError"):
            if words in self.said:
                return words
        if self.code and "error:" not in self.said:
            return "no message"
        return "took more than 2 GB" if self.bytes > BYTES else ""


class LimitedCommands:
    """A process that runs commands one after another.

    Args:
        imports: modules that the commands need anyway: their time and memory are not counted.
    """

    def __init__(self, *imports: str, **environment: str) -> None:
        words = [sys.executable, str(Path(__file__)), *imports]
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environment}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )

    def run(self, *words: str, **variables: str) -> Ended:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps([words, variables]) + "\n")
        self.process.stdin.flush()
        return Ended(*json.loads(self.process.stdout.readline()))

    def __enter__(self) -> LimitedCommands:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _serve(imports: list[str]) -> None:
    """Run each command that a line of stdin names; write how it ended."""
    for name in ["finetune.preflight.checker", *imports]:
        __import__(name)
    from finetune.cli import main

    out = os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        code = main.main(["check", str(ROOT / "recipes" / "quickstart.yaml"), "--quiet"])
    assert code == 0, "commands need what this check has imported and read"
    assert threading.active_count() == 1, "a process with threads can not be forked safely"
    gc.collect()
    gc.freeze()  # else the first collection of each command copies all of these objects
    for line in sys.stdin:
        words, variables = json.loads(line)
        os.write(out, (json.dumps(_forked(words, variables)) + "\n").encode())


def _forked(words: list[str], variables: dict[str, str]) -> tuple[int, str, float, int]:
    with tempfile.TemporaryFile() as said:
        own = _pages("resident")
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _command(words, variables, said.fileno())
        timed_out = False
        while not (found := os.wait4(child, os.WNOHANG))[0]:
            time.sleep(0.002)
            if time.monotonic() - started > ON_THE_WALL:
                timed_out = True
                os.killpg(child, signal.SIGKILL)
                found = os.wait4(child, 0)
                break
        took, usage = time.monotonic() - started, found[2]
        late = timed_out or usage.ru_utime + usage.ru_stime > SECONDS
        said.seek(0)
        text = said.read(200_000).decode(errors="replace")
    code = HUNG if late else os.waitstatus_to_exitcode(found[1])
    return code, text, took, max(0, usage.ru_maxrss * 1024 - own)


def _command(words: list[str], variables: dict[str, str], said: int) -> None:
    """The command in a child, which ends here."""
    code: Any = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ.update(variables)
        limit = _pages("size") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        from finetune.cli import main

        code = main.main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # everything is printed: this process's output is what the test reads
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code or 0))


def _pages(kind: str) -> int:
    """Bytes of this process's memory: `size` of its addresses, or `resident`."""
    size, resident, *_ = Path("/proc/self/statm").read_text().split()
    return int(size if kind == "size" else resident) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _serve(sys.argv[1:])
