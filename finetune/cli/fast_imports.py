"""Import torch, Transformers and PEFT without garbage collection, and show the progress."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

from finetune.distributed import launch_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = 4_600  # that a training run imports


@contextlib.contextmanager
def fast_imports(*, quiet: bool) -> Iterator[None]:
    """Pause garbage collection for the first import, and exempt the imported objects from later collections.

    4,600 modules create a million objects that stay. Without the pause, Python scans them often, which takes
    4 of the 15 CPU seconds of a one-step run.

    Args:
        quiet: show no progress.
    """
    if (
        "peft" in sys.modules or not gc.isenabled()
    ):  # imported before; a freeze would then keep garbage forever
        yield
        return
    gc.collect()
    gc.disable()
    from finetune.core import progress
    from finetune.core.console import Console

    screen = Console(quiet=quiet or not launch_environment.is_main())
    try:
        whole = progress.phase(screen, "importing torch and Transformers", parts=1)
        with whole, progress.part("", lambda: len(sys.modules) / MODULES):
            yield
    finally:
        gc.freeze()
        gc.enable()
