"""Restart all processes of a launch when a process runs out of memory in its first step.

The other processes may wait in a collective that will never end, so no collective can tell them. A thread of
each process asks the launch's key-value store instead. When all processes know, each replaces itself by a new
process with the same command. The process id stays the same, so the launcher does not notice.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed
from torch.distributed.distributed_c10d import Store

POLL_SECONDS = 0.2
# Time until all processes must know of the request. After it, the run ends without a restart.
AGREEMENT_SECONDS = 120
# Variables of a restarted process. It gets a new store without entries of the first attempt.
OWN_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def possible() -> bool:
    """Return whether this process can be replaced. It needs a launch, and no parent in multiprocessing."""
    return (
        multiprocessing.parent_process() is None
        and {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= os.environ.keys()
        and Path("/proc/self/environ").exists()
    )


class FirstStepWatch:
    """Watches whether any process asks for a restart, until all processes have finished their first step."""

    def __init__(self, variable: str, announce: Callable[[str], None]) -> None:
        """Args:
        variable: the environment variable that passes the request to the new process.
        announce: a function that is called with the request just before this process is replaced.
        """
        self.variable, self.announce = variable, announce
        self.wanted = ""
        self.finished, self.requested, self.closed = (threading.Event() for _ in range(3))
        self.thread = threading.Thread(target=self._watch, name="first step", daemon=True)
        self.thread.start()

    def request(self, text: str) -> None:
        """Ask all processes to restart with `text`. Returns only if they did not agree in time."""
        self.wanted = text
        self.thread.join()

    def wait_if_requested(self) -> None:
        """Wait to be replaced if a process asked for it. An error of this process then has the same cause."""
        if self.requested.is_set():
            self.thread.join()

    def _watch(self) -> None:
        try:
            self._follow(connect())
        except (RuntimeError, OSError):  # the store is gone, and with it the launch
            return

    def _follow(self, store: Store) -> None:
        world, has_reported = int(os.environ["WORLD_SIZE"]), False
        while not store.check(["request"]):
            if self.wanted:
                store.set("request", self.wanted)
            elif self.finished.is_set() and not has_reported:
                store.add("finished", 1)
                has_reported = True
            elif self.closed.is_set() or store.add("finished", 0) == world:
                return
            else:
                time.sleep(POLL_SECONDS)
        self.requested.set()
        if os.environ["RANK"] == "0":
            store.set("port", str(free_port()))
        port = store.get("port").decode()
        store.add("ready", 1)
        until = time.monotonic() + AGREEMENT_SECONDS
        while store.add("ready", 0) < world:
            if time.monotonic() > until:
                return
            time.sleep(POLL_SECONDS / 20)  # at the same time: NCCL ends a process whose peers are gone
        text = store.get("request").decode()
        self.announce(text)
        replace_process({self.variable: text, "MASTER_PORT": port, **OWN_STORE})


def connect() -> Any:
    """Open a separate connection to the launch's store, because the existing one may be busy with a wait."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    waits = timedelta(seconds=AGREEMENT_SECONDS)
    distributed: Any = torch.distributed  # pyright takes its stores for private
    store = distributed.TCPStore(host, port, is_master=False, timeout=waits, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return distributed.PrefixStore(f"finetune/first step/{attempt}", store)


def free_port() -> int:
    """Return the next free port above the port of the launch."""
    for port in range(int(os.environ["MASTER_PORT"]) + 1, 65536):
        with closing(socket.socket()) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port above MASTER_PORT")


def replace_process(variables: dict[str, str]) -> None:
    """Replace this process by a new one with the same command and the launcher's environment."""
    for child in psutil.Process().children(recursive=True):  # data loaders and compilers
        child.kill()
    entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    environment = dict(pair.split(b"=", 1) for pair in entries if b"=" in pair)
    environment |= {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    for descriptor in map(int, os.listdir("/proc/self/fd")):  # the GPU, sockets and files
        if descriptor > 2:
            try:
                os.set_inheritable(descriptor, False)
            except OSError:  # the listing's own descriptor is closed by now
                continue
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
