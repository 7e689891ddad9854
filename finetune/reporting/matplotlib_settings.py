"""Use matplotlib with its own default settings, so that plots look the same everywhere."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path


def load() -> None:
    """Import matplotlib without the file `matplotlibrc` of the working directory.

    matplotlib reads this file first, when it is imported. It may be a stranger's, and it can start TeX.
    """
    with (
        contextlib.chdir(Path(__file__).parent)
        if os.path.lexists("matplotlibrc")
        else contextlib.nullcontext()
    ):
        importlib.import_module("matplotlib.figure")


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Draw with matplotlib's default settings in place of the user's."""
    load()
    from matplotlib import style

    with style.context("default", after_reset=True):
        yield
