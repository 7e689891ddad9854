"""`train.report_to`: TensorBoard, W&B, MLflow, trackio ..., each fed by the Trainer's own callback.

Nothing is reported unless it is asked for. TensorBoard's and W&B's files lie in the run folder; MLflow and
trackio keep stores of their own, which many runs share (MLFLOW_TRACKING_URI, TRACKIO_DIR).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.privacy import masked
from finetune.core.visible_text import visible

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import TrainerControl, TrainerState, TrainingArguments

    from finetune.run_folder.run_folder import RunFolder

LONGEST_NAME = 128  # characters of a name that W&B takes
TOLD_LAST = ("tensorboard", "trackio", "wandb")  # MLflow would begin a second run


def safe_name(name: str) -> str:
    """A run's or a project's name as trackers store and show it: on one line, short, without a secret."""
    return visible(masked(name))[:LONGEST_NAME]


class Tracked(TrainerCallback):
    """The trackers of one run, from its first log to the scores of what it saved."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.trackers: dict[str, Any] = {}
        self.where: Any = ()

    def follow(self, trainer: Any) -> None:
        """Put trackers after our callbacks, which add to a log, and TensorBoard's files in the run folder."""
        names = trainer.args.report_to
        for name, kind in zip(names, get_reporting_integration_callbacks(names), strict=True):
            callback: Any = trainer.pop_callback(kind)
            trainer.add_callback(callback)
            self.trackers[name] = callback
            if name == "tensorboard" and callback.logging_dir is None:  # else TENSORBOARD_LOGGING_DIR
                callback.logging_dir = str(self.folder.path / "tensorboard")
        trainer.add_callback(self)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.where = (args, state, control)

    def tell_scores(self) -> None:
        """Base and tuned, as eval.json has them."""
        told = {name: self.trackers[name] for name in TOLD_LAST if name in self.trackers}
        if not told or not self.where[1].is_world_process_zero:
            return
        result = self.folder.read("eval.json")
        scores = {f"eval_{who}_{metric}": v for who in ("base", "tuned") for metric, v in result[who].items()}
        scores = {name: value for name, value in scores.items() if value is not None}
        for name, callback in told.items() if scores else ():
            callback.on_log(*self.where, logs=dict(scores))
            if name != "wandb":  # `running` ends it
                callback.on_train_end(*self.where)


@contextlib.contextmanager
def running(arguments: Any, folder: RunFolder) -> Iterator[Tracked]:
    """The run's trackers, told its scores at the end.

    W&B's files lie in the run folder unless WANDB_DIR is set, and its run ends with this one.

    Raises:
        UserError: W&B refuses: no key, no network (exit 3).
    """
    tracked = Tracked(folder)
    if "wandb" not in arguments.report_to:
        yield tracked
        tracked.tell_scores()
        return
    wandb: Any = importlib.import_module("wandb")
    ours, failed = "WANDB_DIR" not in os.environ, 1
    os.environ.setdefault("WANDB_DIR", str(folder.path))
    try:
        yield tracked
        tracked.tell_scores()
        failed = 0
    except wandb.errors.Error as error:
        fix, found = "run `wandb login`, or set WANDB_MODE=offline", " ".join(str(error).split())
        problem = Problem("W&B can't be reached", "train.report_to", found=found, fix=fix, code="experiment")
        raise UserError(problem, code=Exit.ENVIRONMENT) from error
    finally:
        wandb.finish(exit_code=failed)
        if ours:
            del os.environ["WANDB_DIR"]
