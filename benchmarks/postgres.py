"""A PostgreSQL server in a new folder, on a Unix socket alone, that ends with the `with` block."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

USERS = ("postgres", "nobody")  # it refuses to run as root


def missing() -> str:
    """Why there can be none here; empty: there can."""
    lacking = [name for name in ("initdb", "pg_ctl", "postgres") if not shutil.which(name)]
    lacking += [] if find_spec("psycopg") else ["psycopg"]
    return f"not installed: {', '.join(lacking)}" if lacking else ""


@contextlib.contextmanager
def serve() -> Iterator[tuple[str, str]]:
    """Yields: the URL of an empty database, and the password in it."""
    known = {entry.pw_name for entry in pwd.getpwall()}
    user = next(name for name in USERS if name in known) if os.geteuid() == 0 else None
    # Another user can't enter a private TMPDIR
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp" if user else None))
    password = secrets.token_hex(12)
    file = folder / "password"
    file.write_text(password)
    if user:
        for path in (folder, file):
            shutil.chown(path, user)

    def run(*command: str) -> None:
        as_user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []} if user else {}
        given = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": folder}
        subprocess.run(command, check=True, **given, **as_user)

    data, log = str(folder / "data"), str(folder / "log")
    try:
        asked = [
            "--auth=scram-sha-256",
            "--username=tuner",
            f"--pwfile={file}",
            "--no-sync",
            "--encoding=UTF8",
        ]
        run("initdb", "-D", data, *asked, "--locale=C")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-D", data, "-l", log, "-o", options, "-w", "start")
        try:
            yield f"postgresql://tuner:{password}@/postgres?host={folder}", password
        finally:
            run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
