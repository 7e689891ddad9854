"""Print tables and progress on the terminal, and plain lines elsewhere. log.txt gets all output.

All output goes through this module. It masks secrets and escapes characters that would control a terminal.
Each string is one line: the console shows a line break in it as an escape. Only rank 0 prints. Messages of
other libraries go to log.txt, because the user can't act on them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.console import Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from finetune.core import progress, safe_files, upstream_private
from finetune.core.formatting import duration, labelled
from finetune.core.privacy import masked, secrets, switch_off_telemetry
from finetune.core.visible_text import continued, visible

PLAIN_WIDTH = WIDE = 120
PLAIN_LINES = 20  # approximate number of progress lines of a run without a terminal
# Of tables, in characters
GAP = 2  # between two columns
FOLDED = 30  # a longer word is a path or a recipe key, and may be folded
INDENT = 2  # of a row's cells below its first cell


class LibraryRecords(logging.Formatter):
    """Format log records of libraries without secrets. No line looks like a message of finetune."""

    def format(self, record: logging.LogRecord) -> str:
        return continued(masked(super().format(record)))


class Console:
    """The terminal and, once the run folder exists, its log.txt."""

    def __init__(self, *, quiet: bool = False, verbose: bool = False) -> None:
        self.verbose = verbose
        plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
        self.console = RichConsole(quiet=quiet, **plain)
        if not self.console.is_terminal:
            self.console = RichConsole(quiet=quiet, width=PLAIN_WIDTH, **plain)
        self._log: RichConsole | None = None
        self._handler: logging.StreamHandler[Any] | None = None
        self._progress: Progress | None = None
        self._waiting = contextlib.ExitStack()  # the phase of training, without a terminal
        self._started = 0.0
        self._done = 0

    def say(self, *lines: str | Table, style: str = "") -> None:
        """Print lines and tables, and write them to log.txt once there is one."""
        for line in lines:
            shown = Text(visible(masked(line)), style) if isinstance(line, str) else line
            plain: Any = {"soft_wrap": isinstance(line, str)}
            if not self.console.quiet:  # a quiet console would spend time on the layout
                self.console.print(shown, **plain)
            if self._log:
                self._log.print(shown, **plain)

    def note(self, *notices: str) -> None:
        """Print notices, each labelled as a warning or a note."""
        self.say(*map(labelled, notices))

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], wide: Collection[str] = ()
    ) -> None:
        """Print a table.

        Args:
            wide: columns that need a terminal of at least WIDE characters. log.txt has all columns.
        """
        known = secrets()
        names, *cells = [[visible(masked(str(cell), known)) for cell in line] for line in (columns, *rows)]
        self.say("")
        if title:  # printed on its own line, because a table would wrap it
            self.say(title, style="bold")
        narrow = [index for index, name in enumerate(columns) if name not in wide]
        shown = range(len(columns)) if self.console.width >= WIDE else narrow
        if not self.console.quiet:
            narrowed = [[line[i] for i in shown] for line in (names, *cells)]
            self.console.print(render_table(narrowed[0], narrowed[1:], self.console.width))
        if self._log:
            self._log.print(render_table(names, cells, self._log.width))

    def log(self, *lines: str) -> None:
        """Write lines into log.txt only."""
        if self._log:
            for line in lines:
                self._log.print(Text(visible(masked(line))))

    def flush(self) -> None:
        """Flush the terminal and log.txt."""
        self.console.file.flush()
        if self._log:
            self._log.file.flush()

    def log_to(self, path: Path, *, again: bool = False) -> None:
        """Write all output and the warnings of libraries to `path`. `again` appends to the file."""
        write_to = safe_files.open_append if again else safe_files.open_new
        file = write_to(path.parent, path.name)
        self._log = RichConsole(file=file, width=140, highlight=False, markup=False, emoji=False)
        self._handler = logging.StreamHandler(file)
        self._handler.setFormatter(LibraryRecords("%(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._handler)

    def start(self, total: int, done: int = 0) -> None:
        """Start the progress display of `total` training steps, of which `done` are finished."""
        self._started, self._done = time.monotonic(), done
        if self.console.quiet:
            return
        if not self.console.is_terminal:
            self._waiting.enter_context(progress.phase(self, "training", parts=total - done))
            return
        text = TextColumn("{task.description}", markup=False)
        before = TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        columns = (*before, TextColumn("left"), text)
        self._progress = Progress(*columns, console=self.console, transient=True)
        self._progress.start()
        self._progress.add_task("starting", total=total, completed=done)

    def reach(self, step: int) -> None:
        """Show that a step has ended."""
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=step)
        elif not self.console.quiet:
            progress.finish(step - self._done)

    def step(self, step: int, total: int, line: str) -> None:
        """Show one logged step. Without a terminal, show each 20th of the steps, and one after 30 s."""
        self.reach(step)
        line = visible(line)
        if self._progress:
            self._progress.update(self._progress.task_ids[0], description=line)
        left = (time.monotonic() - self._started) / (step - self._done) * (total - step)
        text = f"step {step}/{total}  {line}  {duration(left)} left"
        if not self._progress and not self.console.quiet:
            is_due = step in (1, total) or step % max(1, total // PLAIN_LINES) == 0
            if progress.is_line_due(is_due=is_due):
                self.console.print(text)
        self.log(text)

    def stop(self) -> None:
        """End the training display."""
        self._waiting.close()
        if self._progress:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        """Close log.txt."""
        self.stop()
        if self._handler:
            logging.getLogger().removeHandler(self._handler)
            self._handler = None
        if self._log:
            self._log.file.close()
            self._log = None


def quieten_libraries() -> None:
    """Send warnings and log records of libraries to the root logger, and replace their progress bars."""
    switch_off_telemetry()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own prints
    logging.captureWarnings(True)
    root = logging.getLogger()
    if not any(isinstance(handler, logging.NullHandler) for handler in root.handlers):
        root.addHandler(logging.NullHandler())  # before the imports, because some libraries log at import
    import datasets
    import transformers

    for name in (
        "transformers",
        "datasets",
        "huggingface_hub",
        "accelerate",
        "trl",
        "peft",
        "bitsandbytes",
        "torchao",
    ):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    logging.getLogger(upstream_private.LOGS_ENUMS).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_tqdm_hook(progress.library_bar)
    datasets.disable_progress_bars()


def render_table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table | Group:
    """Return a table of at most `width` characters, or a list of its rows if the columns do not fit."""
    lines = [list(columns), *map(list, rows)]
    natural = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    words = [max(map(_longest_word, column)) for column in zip(*lines, strict=True)]
    room = width - GAP * (len(columns) - 1)
    for least in ([natural[0], *words[1:]], words):  # the first column wraps last
        if sum(least) <= room:
            return _table(columns, rows, _widths(natural, least, room))
    if len(columns) <= 2:  # a very narrow terminal
        return _table(columns, rows, _widths(natural, [min(word, room // 2) for word in words], room))
    return Group(*_as_list(columns, rows, width))


def _longest_word(text: str) -> int:
    return min(FOLDED, max(map(cell_len, text.split()), default=0))


def _widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return the width of each column, at least `least`. Columns that need few characters grow first."""
    needs = [most - few for most, few in zip(natural, least, strict=True)]
    free, given = room - sum(least), list(least)
    by_need = sorted(range(len(needs)), key=needs.__getitem__)
    for place, index in enumerate(by_need):
        grown = min(needs[index], free // (len(by_need) - place))
        given[index] += grown
        free -= grown
    return given


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=any(columns))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(Text(column), overflow="fold", header_style="dim", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _as_list(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[Text | Padding]:
    """Yield each row as its first cell, and below it a line for each other cell with its column's name."""
    for first, *cells in rows:
        yield Text(first, overflow="fold")
        named = [(name, cell) for name, cell in zip(columns[1:], cells, strict=True) if cell]
        if named:
            yield Padding(render_table(("", ""), named, width - INDENT), (0, 0, 0, INDENT))
