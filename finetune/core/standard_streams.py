"""Standard output and error: lines that show what is in them, and streams that a reader may close."""

from __future__ import annotations

import io
import os
import sys

from finetune.core.privacy import masked, secrets
from finetune.core.visible_text import visible

STDERR = 2  # the number of the file


class _Closable(io.FileIO):
    """A stream whose reader may leave, as in `finetune doctor | head`, or whose disk may be full.

    All later output is discarded. The command continues if the reader has left. Otherwise it ends with the
    error, unless it can't print an error.
    """

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type] (a buffer: FileIO's own type is private)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # for all later output, of C code too
            if not (isinstance(error, BrokenPipeError) or self.fileno() == STDERR):
                raise
            return super().write(data)  # type: ignore[arg-type] (a buffer: FileIO's own type is private)


def say(*lines: object, error: bool = False) -> None:
    """Print each line without secrets. A line break in a line is shown, not made.

    Args:
        error: print on standard error.
    """
    stream, known = sys.stderr if error else sys.stdout, secrets()
    print(*(visible(masked(str(line), known)) for line in lines), sep="\n", file=stream, flush=True)


def open_closed() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Otherwise the next file that any code opens would get the stream's number, and all that is printed.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, mode, encoding="utf-8", closefd=False))


def allow_closing() -> None:
    r"""Let the readers of standard output and error leave early, and discard output after an error.

    Input that is not UTF-8 is read as Python reads such arguments, so that its reader can refuse it. A letter
    that the encoding of a terminal or a log lacks is shown as an escape, such as `\u4e2d`.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.flush()
            raw = _Closable(stream.fileno(), "w", closefd=False)
            buffered = io.BufferedWriter(raw)
            replacement = io.TextIOWrapper(
                buffered,
                stream.encoding,
                "backslashreplace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
                line_buffering=True,  # a line that can't be written is an error now, not at the end
                write_through=stream.write_through,
            )
            setattr(sys, name, replacement)
