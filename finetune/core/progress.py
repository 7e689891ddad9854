"""Show the progress of long phases: a bar with the time left on a terminal, or a line every 30 s.

    with phase(console, "merge", parts=3):
        with part("loading the model"):
            ...
        with part("comparing the logits"):
            for batch in track(batches, total=300):
                ...

The functions that do the work have no console, so the current phase is a context variable. Without a phase,
`part` and `track` show nothing. A thread refreshes the display, because a single call can take minutes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from rich.progress import BarColumn, Progress, TextColumn

from finetune.core.formatting import duration, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from rich.console import Console as RichConsole

Item = TypeVar("Item")
FIRST = 3.0  # seconds of a phase before anything is shown
BETWEEN = 30.0  # seconds between two lines
REFRESH = 1.0  # seconds between two refreshes by the thread
COLUMNS = 45  # columns of the bar, the amount and the time left


class Screen(Protocol):
    """The part of `core.console.Console` that a phase uses."""

    console: RichConsole

    def say(self, *lines: str) -> None:
        """Print lines."""


class Shown(NamedTuple):
    """What a bar or a line shows."""

    label: str
    share: float | None
    """Share of the phase that is done. `None` if it is not known."""
    amount: str
    left: str


class Phase:
    """The display of one phase."""

    def __init__(self, console: Screen, name: str, parts: int | None) -> None:
        self.console, self.name, self.parts = console, name, parts
        self.started = self.last = time.monotonic()
        self.bar: Progress | None = None
        self.lock, self.ended, self.covered = threading.RLock(), threading.Event(), False
        self.part, self.share_of_part, self.unit = "", None, ""
        self.done = self.skipped = 0
        self.within = self.floor = 0.0
        """Share of the current part that is done, now and when its current loop began."""
        self.counts: tuple[int, int | None, float] | None = None
        """The current loop's finished items, all items, and its start."""

    def state(self, now: float) -> Shown:
        """Return what to show."""
        if self.parts:
            within = self.share_of_part() if self.share_of_part else self.within
            finished = self.done + min(max(within, 0.0), 1.0)
            made, left = finished - self.skipped, max(self.parts - finished, 0.0)
            label = f"{self.name}, {self.part}" if self.part else self.name
            share = min(finished / self.parts, 1.0)
            return Shown(label, share, f"{share:.0%}", _left(now - self.started, made, left))
        if not self.counts:
            return Shown(self.name, None, duration(now - self.started), "")
        done, total, started = self.counts
        if not total:
            return Shown(self.name, None, f"{done:,} {self.unit}", "")
        left = _left(now - started, done, total - done)
        return Shown(self.name, done / total, f"{done:,} of {total:,}", left)

    def show(self) -> None:
        """Update the bar, or print a line if the last one is 30 s old."""
        now, rich = time.monotonic(), self.console.console
        if rich.quiet or now - self.started < FIRST:
            return
        with self.lock:
            if self.covered or self.ended.is_set():
                return
            if rich.is_terminal:
                self._draw(self.state(now), rich.width)
            elif now - self.last >= BETWEEN and (shown := self.state(now)).share != 1:
                self.last = now
                self.console.say(", ".join(filter(None, [f"{shown.label}: {shown.amount}", shown.left])))

    def _draw(self, shown: Shown, width: int) -> None:
        total = None if shown.share is None else 1.0
        values: Any = {
            "label": shortened(shown.label, max(width - COLUMNS, 20)),
            "amount": shown.amount,
            "left": shown.left,
            "completed": shown.share or 0.0,
            "total": total,
        }
        if self.bar:
            self.bar.update(self.bar.task_ids[0], **values)
            return
        label, amount, left = (
            TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("label", "amount", "left")
        )
        self.bar = Progress(label, BarColumn(15), amount, left, console=self.console.console, transient=True)
        self.bar.add_task("", **values)
        self.bar.start()

    def begin_loop(self, unit: str) -> None:
        """Let the next loop count for half of what is left of the current part."""
        self.floor, self.unit = self.within, unit

    def count(self, done: int, total: int | None, started: float) -> None:
        """Store how many items of a loop are done since `started` (seconds of the monotonic clock)."""
        self.counts = (done, total, started)
        if total:
            self.within = self.floor + (1 - self.floor) / 2 * min(done / total, 1.0)
        self.show()

    def begin_part(self, name: str, share: Callable[[], float] | None) -> None:
        self.part, self.share_of_part, self.within, self.floor = name, share, 0.0, 0.0

    def end_part(self) -> None:
        with self.lock:
            self.done += 1
            self.begin_part("", None)

    def cover(self, *, covered: bool) -> None:
        """Remove the bar while another phase runs within this one, or allow it again."""
        with self.lock:
            self.covered = covered
            self._remove()

    def close(self) -> None:
        """End the display."""
        with self.lock:
            self.ended.set()
            self._remove()

    def _remove(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None

    def refresh(self) -> None:
        """Show the state each second until the phase ends."""
        while not self.ended.wait(REFRESH):
            self.show()


def _left(seconds: float, done: float, left: float) -> str:
    """Return the time that is left, if `done` units took these seconds."""
    return f"{duration(seconds / done * left)} left" if done > 0 else ""


_current: ContextVar[Phase | None] = ContextVar("phase", default=None)


@contextlib.contextmanager
def phase(console: Screen | None, name: str, parts: int | None = None) -> Iterator[None]:
    """Show the progress of every `part` and `track` within the context.

    Args:
        console: `None` means the console of the surrounding phase. Without one, nothing is shown.
        parts: the number of parts, if the phase has parts.
    """
    before = _current.get()
    console = console or (before.console if before else None)
    if console is None:
        yield
        return
    display = Phase(console, name, parts)
    if before:
        before.cover(covered=True)
    token = _current.set(display)
    if not console.console.quiet:
        threading.Thread(target=display.refresh, daemon=True).start()
    try:
        yield
    finally:
        _current.reset(token)
        display.close()
        if before:
            before.cover(covered=False)


def expect(parts: int) -> None:
    """Set the number of parts of the current phase."""
    if shown := _current.get():
        shown.parts = parts


def reach(parts: int) -> None:
    """Set the number of finished parts. The time left is estimated from the parts that ran in this phase."""
    if shown := _current.get():
        shown.skipped += parts - shown.done
        shown.done = parts


def finish(parts: int) -> None:
    """Set the number of finished parts of the current phase, which ran in this phase."""
    if shown := _current.get():
        shown.done = parts


def is_line_due(*, is_due: bool) -> bool:
    """Return whether to print a line about the current phase: if `is_due` is set or the last one is 30 s old.

    The phase then prints none of its own for 30 s.
    """
    shown = _current.get()
    if shown is None:
        return is_due
    with shown.lock:
        now = time.monotonic()
        is_due = is_due or now - shown.last >= BETWEEN
        shown.last = now if is_due else shown.last
    return is_due


@contextlib.contextmanager
def part(name: str, share: Callable[[], float] | None = None) -> Iterator[None]:
    """Show a part of the current phase.

    Args:
        share: returns the share of the part that is done. The loops and phases within the part are then not
            shown. `None` means that the loops within the part count.
    """
    shown = _current.get()
    if shown is None:
        yield
        return
    shown.begin_part(name, share)
    token = _current.set(None if share else shown)
    try:
        yield
    finally:
        _current.reset(token)
        shown.end_part()


def track(
    items: Iterable[Item], total: int | None, size: Callable[[Item], int] = len, unit: str = "done"
) -> Iterator[Item]:
    """Yield the items, and show the progress of the current phase after each.

    Args:
        total: the sum of all sizes; `None` if it is not known.
        size: returns the size of an item; by default its length.
        unit: the name of the items, for a loop without a known total.
    """
    started, done = time.monotonic(), 0
    if shown := _current.get():
        shown.begin_loop(unit)
    for item in items:
        yield item
        done += size(item)
        if shown := _current.get():
            shown.count(done, total, started)


def library_bar(factory: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Return a progress bar of Transformers, which counts its items in the current phase.

    It is the hook of `transformers.utils.logging.set_tqdm_hook`. Transformers loads and saves weights in
    such loops.
    """
    if _current.get() and given and isinstance(given[0], Collection):
        given = (track(given[0], len(given[0]), lambda _: 1), *given[1:])
    return factory(*given, **options)
