"""Show the progress of long phases: a bar with the time left on a terminal, or a line every 30 s.

    with phase(console, "evaluating the fine-tuned model"):
        for batch in track(batches, total=300):
            ...

Functions that call `track` have no console, so the current phase is a context variable.
Without a phase, `track` shows nothing.
"""

from __future__ import annotations

import contextlib
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from finetune.core.console import Console

Item = TypeVar("Item")
FIRST = 3.0  # seconds of a phase before anything is shown
BETWEEN = 30.0  # seconds between two lines


class Phase:
    """The display of one phase."""

    def __init__(self, console: Console, name: str) -> None:
        self.console, self.name = console, name
        self.bar: Progress | None = None
        self.last = time.monotonic()

    def show(self, done: int, total: int | None, started: float) -> None:
        """Show that `done` items of `total` are done since `started` (seconds of the monotonic clock)."""
        now, rich = time.monotonic(), self.console.console
        if rich.quiet or now - started < FIRST:
            return
        if rich.is_terminal:
            if self.bar is None:
                text = TextColumn(self.name, markup=False)
                columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                self.bar = Progress(*columns, console=rich, transient=True)
                self.bar.start()
                self.bar.add_task("", total=total)
            self.bar.update(self.bar.task_ids[0], completed=done, total=total)
        elif now - self.last >= BETWEEN and done != total:
            self.last = now
            left = f" of {total:,}, {(now - started) / done * (total - done):.0f} s left" if total else ""
            self.console.say(f"{self.name}: {done:,}{left}")

    def close(self) -> None:
        """Remove the bar."""
        if self.bar:
            self.bar.stop()


_current: ContextVar[Phase | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def phase(console: Console | None, name: str) -> Iterator[None]:
    """Show the progress of every `track` within the context. Without a console, show nothing."""
    display = Phase(console, name) if console else None
    before = _current.set(display)
    try:
        yield
    finally:
        _current.reset(before)
        if display:
            display.close()


def track(items: Iterable[Item], total: int | None, size: Callable[[Item], int] = len) -> Iterator[Item]:
    """Yield the items, and show the progress of the current phase after each.

    Args:
        total: the sum of all sizes; `None` if it is not known.
        size: returns the size of an item; by default its length.
    """
    started, done = time.monotonic(), 0
    for item in items:
        yield item
        done += size(item)
        if shown := _current.get():
            shown.show(done, total, started)
