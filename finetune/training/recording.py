"""Keep log.txt and checks.json of a run, however it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from finetune.autoconfig.machine_setup import Setup
from finetune.core.command_lines import command
from finetune.core.console import Console
from finetune.core.errors import Stopped, UserError
from finetune.core.run_checks import RunChecks
from finetune.core.visible_text import visible
from finetune.reporting import html_report
from finetune.run_folder.run_folder import RunFolder
from finetune.training.auto_correction import StartAgain


@contextlib.contextmanager
def recording(
    screen: Console, checks: RunChecks, folder: RunFolder, setup: Setup, *, again: bool
) -> Iterator[None]:
    """Write log.txt from now on, and write checks.json however the run ends.

    Args:
        again: whether to append to log.txt.
    """
    if setup.launch.main:
        screen.log_to(folder.path / "log.txt", again=again)
    ended, over = "", True  # the reason, if the run does not finish
    try:
        yield
    except StartAgain:
        over = False
        raise
    except Stopped as stopped:
        stopped.folder, ended = str(folder.path), str(stopped)
        if folder.weights.exists():
            evaluate = command("evaluate", str(folder.path))
            stopped.args = (f"{ended}; the trained weights are saved; next: {evaluate}",)
        raise
    except UserError as error:
        ended = str(error)
        raise
    except Exception as error:  # any error, so that the report can tell a crash from a running run
        ended = visible(f"error: {type(error).__name__}: {error}")
        raise
    finally:
        # On a full disk nothing can be written, and the error is being raised already.
        with contextlib.suppress(*[OSError] * bool(ended)), contextlib.closing(screen):
            if ended:
                screen.log(*ended.split("\n"))
            if setup.launch.main and over:
                folder.write("checks.json", checks.as_json())
                html_report.after(folder.path, screen)
