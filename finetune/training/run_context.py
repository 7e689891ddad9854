"""The recipe, machine and folder of a run, which every stage needs, and the files that it always leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from trl.trainer.sft_config import SFTConfig

from finetune.autoconfig.batch_size import Batch
from finetune.autoconfig.machine_setup import Setup
from finetune.checkpointing.checkpoints import VerifiedCheckpoint
from finetune.core.command_lines import command
from finetune.core.console import Console
from finetune.core.errors import Stopped, UserError
from finetune.core.run_checks import Choice, RunChecks
from finetune.core.visible_text import visible
from finetune.data.preparation import Prepared
from finetune.recipe.schema import Recipe
from finetune.reporting import html_report
from finetune.run_folder.run_folder import RunFolder
from finetune.training.auto_correction import NONE, Correction, StartAgain


@dataclass(frozen=True)
class RunContext:
    """A run: its recipe, its machine and launch, and where its results go."""

    recipe: Recipe
    setup: Setup
    """The machine, the launch, and the attention and storage that were chosen for them."""
    checks: RunChecks
    console: Console
    folder: RunFolder
    checkpoint: VerifiedCheckpoint | None = None
    """The checkpoint that the run resumes."""
    correction: Correction = NONE
    """What an earlier start changed, because the first step ran out of memory."""


@dataclass(frozen=True)
class RunData:
    """The data of a run, and TRL's arguments for training on it."""

    tokenizer: PreTrainedTokenizerBase
    prepared: Prepared
    arguments: SFTConfig


@dataclass(frozen=True)
class StepPlan:
    """How a run makes its optimizer steps. The choices are known once the model is loaded."""

    batch: Batch
    steps: int
    contract: dict[str, Any]
    """What must be the same when a checkpoint of this run is resumed."""
    choices: dict[str, Choice] = field(default_factory=dict)
    """The choices for `speed:`, by option."""
    flops_per_token: float = 0.0

    def is_on(self, option: str) -> bool:
        """Return whether an option such as `speed.compile` is chosen."""
        return option in self.choices and self.choices[option].value == "on"


@contextlib.contextmanager
def recording(run: RunContext) -> Iterator[None]:
    """Write log.txt from now on, and write checks.json however the run ends.

    A resumed run, and a run that started again with a correction, append to log.txt.
    """
    screen, folder, main = run.console, run.folder, run.setup.launch.main
    if main:
        again = run.checkpoint is not None or bool(run.correction.changes)
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
            if main and over:
                folder.write("checks.json", run.checks.as_json())
                html_report.after(folder.path, screen)
