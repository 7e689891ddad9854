"""`train.report_to`: log to TensorBoard, W&B, MLflow, trackio and others by the Trainer's own callbacks.

finetune reports nothing unless the recipe asks for it. TensorBoard and W&B write to the run folder. MLflow
and trackio write to their own stores, which many runs share (MLFLOW_TRACKING_URI, TRACKIO_DIR).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from finetune.core.errors import Exit, Problem, UserError
from finetune.core.privacy import masked
from finetune.core.visible_text import visible
from finetune.run_folder.run_folder import RunFolder

LONGEST_NAME = 128  # most characters of a name in W&B
TOLD_LAST = ("tensorboard", "trackio", "wandb")  # MLflow would begin a second run


def safe_name(name: str) -> str:
    """Return a name for trackers on one line, truncated and without secrets."""
    return visible(masked(name))[:LONGEST_NAME]


class Tracked(TrainerCallback):
    """The trackers of one run, from its first log to the scores of the saved weights."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.trackers: dict[str, Any] = {}
        self.where: Any = ()

    def follow(self, trainer: Any) -> None:
        """Move trackers behind finetune's callbacks, which add to a log, and set TensorBoard's folder."""
        names = trainer.args.report_to
        for name, kind in zip(names, get_reporting_integration_callbacks(names), strict=True):
            callback: Any = trainer.pop_callback(kind)
            trainer.add_callback(callback)
            self.trackers[name] = callback
            if name == "tensorboard" and not callback.logging_dir:  # else TENSORBOARD_LOGGING_DIR
                callback.logging_dir = str(self.folder.path / "tensorboard")
        trainer.add_callback(self)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        self.where = (args, state, control)

    def tell_scores(self) -> None:
        """Log the scores of the base model and the fine-tuned model from eval.json."""
        trackers = {name: self.trackers[name] for name in TOLD_LAST if name in self.trackers}
        if not trackers or not self.where[1].is_world_process_zero:
            return
        result = self.folder.read("eval.json")
        scores = {f"eval_{who}_{metric}": v for who in ("base", "tuned") for metric, v in result[who].items()}
        scores = {name: value for name, value in scores.items() if value is not None}
        for name, callback in trackers.items() if scores else ():
            callback.on_log(*self.where, logs=dict(scores))
            if name != "wandb":  # `running` ends it
                callback.on_train_end(*self.where)


@contextlib.contextmanager
def running(arguments: Any, folder: RunFolder) -> Iterator[Tracked]:
    """Yield the run's trackers, and log the scores at the end.

    W&B writes to the run folder unless WANDB_DIR is set. Its run ends with this run.

    Raises:
        UserError: W&B has no key or no network (exit 3).
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
        raise UserError(
            Problem(
                "W&B can't be reached",
                "train.report_to",
                found=" ".join(str(error).split()),
                fix="run `wandb login`, or set WANDB_MODE=offline",
                code="experiment",
            ),
            code=Exit.ENVIRONMENT,
        ) from error
    finally:
        wandb.finish(exit_code=failed)
        if ours:
            del os.environ["WANDB_DIR"]
