"""Fixtures of attacks."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from support.limited_commands import LimitedCommands

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Each address that a test reaches for: it is recorded and not reached."""
    asked: list[str] = []
    connect = socket.socket.connect

    def refuse(*given: Any, **_: Any) -> Any:
        asked.append(" ".join(map(str, given)))
        raise OSError("no network in this test")

    def connect_here(own: socket.socket, address: Any) -> None:
        if own.family == socket.AF_UNIX:  # of multiprocessing
            return connect(own, address)
        return refuse(address)

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", connect_here)
    monkeypatch.setattr(socket.socket, "connect_ex", connect_here)
    yield asked


@pytest.fixture(scope="session")
def commands() -> Iterator[LimitedCommands]:
    """One server of commands for the tests of all modules."""
    with LimitedCommands("pyarrow.parquet", "tokenizers") as running:
        yield running
