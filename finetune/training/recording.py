"""Keep log.txt and checks.json of a run, however it ends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from finetune.core.console import Console
from finetune.core.errors import Stopped, UserError
from finetune.core.run_checks import RunChecks
from finetune.core.visible_text import visible
from finetune.reporting import html_report
from finetune.run_folder.run_folder import RunFolder
from finetune.training.auto_correction import StartAgain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune.autoconfig.machine_setup import Setup


@contextlib.contextmanager
def recording(
    screen: Console, ledger: RunChecks, folder: RunFolder, setup: Setup, *, again: bool
) -> Iterator[None]:
    """Keep log.txt from here on, and leave checks.json behind however the run ends.

    Args:
        again: log.txt goes on.
    """
    if setup.launch.main:
        screen.log_to(folder.path / "log.txt", again=again)
    ended, over = "", True  # why, where it does not come to its end
    try:
        yield
    except StartAgain:
        over = False
        raise
    except Stopped as stopped:
        stopped.folder, ended = str(folder.path), str(stopped)
        if folder.weights.exists():
            stopped.args = (f"{ended}; what was trained is saved: finetune evaluate {folder.path}",)
        raise
    except UserError as error:
        ended = str(error)
        raise
    except Exception as error:  # of whatever kind: the page tells a crash from a run that goes on
        ended = visible(f"error: {type(error).__name__}: {error}")
        raise
    finally:
        # On a disk that is full nothing more can be left, and why is on its way already
        with contextlib.suppress(*[OSError] * bool(ended)), contextlib.closing(screen):
            if ended:
                screen.log(*ended.split("\n"))
            if setup.launch.main and over:
                folder.write("checks.json", ledger.as_json())
                html_report.after(folder.path, screen)
