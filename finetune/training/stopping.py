"""Decide when a run saves, and when it ends before its last step: at a signal, a time or a step."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune.autoconfig import batch_size, optimizer_choice
from finetune.checkpointing import serialization
from finetune.checkpointing.checkpoints import Writer
from finetune.core import signals
from finetune.core.errors import Exit, Problem, Stopped, UserError
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, deepspeed_zero, launch_environment
from finetune.recipe.schema import Train
from finetune.training.stop_condition import Until

MINUTES = 10  # between checkpoints, if the recipe does not set it


def check(train: Train, resumes: str | None, keeper: str) -> None:
    """Refuse requested checkpoints if they can't store the whole state of the run (exit 3)."""
    parts = optimizer_choice.unsaved(train, keeper)
    option = "--resume" if resumes else ""
    if train.save_strategy in ("steps", "epoch") or train.save_steps is not None:
        option = "train.save_strategy" if train.save_strategy != "auto" else "train.save_steps"
    if parts and option and resumes != "auto":
        raise UserError(
            Problem(
                f"{option} does not work here, because checkpoints can't store the state that {parts} keeps",
                found=parts.rstrip(","),
                fix=optimizer_choice.saved_instead(parts),
                code="checkpoint",
            ),
            code=Exit.ENVIRONMENT,
        )


class Stop:
    """A request to end a run: a signal, or `--until`."""

    signal = ""
    """The name of the first signal."""
    keeps = True
    """Whether the run can write a checkpoint."""
    deferred = False
    """Whether the run trains or saves, and so ends after the step. Otherwise a signal ends it at once."""
    failed = False
    """Whether the protected block raised an error, which is reported instead of a signal."""
    step_began: float | None = None
    """When the current step began, by `time.monotonic()`."""

    def __init__(self, until: Until | None = None) -> None:
        self.until = until

    @contextlib.contextmanager
    def listening(self) -> Iterator[Stop]:
        """Take signals in this process."""
        with signals.listening(self.heard):
            yield self

    def heard(self, name: str) -> None:
        if self.failed:
            return
        self.signal = name
        if not self.deferred:
            raise Stopped(f"stopped by {name}")
        hung = time.monotonic() - self.step_began if self.step_began is not None else 0.0
        if collectives.given_up(hung):
            launch_environment.report(
                str(
                    Problem(
                        "this process hung in a step, and the other processes gave up",
                        fix="find the cause in the stack above, then resume with --resume",
                        code="launch-lost",
                        found=f"no progress for {hung:.0f} s",
                        why="it waited for a process that has ended",
                    )
                ),
                time.time() - hung,
            )
            os._exit(Exit.TRAINING)  # the launcher would wait 30 s before it kills this process
        if launch_environment.is_main():
            first = "saving" if self.keeps else "exiting without a checkpoint"
            then = ", then exiting" if self.keeps else ""
            again = "a second signal exits at once"
            os.write(2, f"\n{name}: {first} after this step{then}; {again}\n".encode())

    @contextlib.contextmanager
    def later(self) -> Iterator[None]:
        """Protect a block from signals. A signal during the block ends the run after it."""
        self.deferred = True
        try:
            yield
        except Exception:  # any error is raised again, and no signal is reported instead
            self.failed = True
            raise
        finally:
            self.deferred = False
        if collectives.any_of(bool(self.signal))[0]:
            stopped = Stopped(f"stopped by {next(filter(None, collectives.gathered(self.signal)))}")
            stopped.together = True
            raise stopped

    def due(self, step: int, seconds: float) -> str:
        """Return why the run must end after this step; the empty string if it continues.

        Args:
            seconds: the time of one more step and a checkpoint.
        """
        if self.signal:
            return self.signal
        if self.until and self.until.reached(step, seconds):
            return f"--until {self.until.text}"
        return ""


def check_control(control: object) -> None:
    """Refuse what a callback of the caller returned or asked for, if finetune does not follow it (exit 2)."""
    if not isinstance(control, TrainerControl):
        what, why = (
            "a callback returned something other than a TrainerControl",
            "transformers would use it as one",
        )
        fix, key = "return the argument `control`, or nothing", ""
    elif control.should_evaluate:
        what, why = "a callback asks for an evaluation", "finetune evaluates by the settings of the recipe"
        fix, key = "set `eval.eval_steps` and a validation set", "eval.eval_steps"
    elif control.should_epoch_stop and not control.should_training_stop:
        what, why = "a callback ends an epoch early", "resume and the learning rate need whole epochs"
        fix, key = "set `control.should_training_stop`, which ends the training", ""
    else:
        return
    found = "" if isinstance(control, TrainerControl) else type(control).__name__
    raise UserError(Problem(what, key, found=found, fix=fix, why=why, code="your-code"))


class Schedule(TrainerCallback):
    """Decide at which steps to save, and end the run with a checkpoint if requested."""

    stopped = ""
    """The reason that the run ended before its last step."""
    complete = False
    """Whether the run ended by itself: at its last step, by early stopping or by a callback."""

    def __init__(self, train: Train, stop: Stop, writer: Writer, keeper: str) -> None:
        self.train, self.stop, self.writer = train, stop, writer
        self.parts = optimizer_choice.unsaved(train, keeper)
        stop.keeps = not self.parts
        self.strategy = "no" if self.parts else train.save_strategy
        if self.strategy == "auto" and train.save_steps is not None:
            self.strategy = "steps"
        self.saved = False

    def end_if_stopped(self, step: int) -> None:
        """End a run that was told to stop before its last step.

        Raises:
            Stopped: the run has saved a checkpoint.
            UserError: checkpoints can't store the state of its optimizer (exit 5).
        """
        if not self.stopped:
            return
        if self.parts:
            raise UserError(
                Problem(
                    f"stopped by {self.stopped} after step {step} without a checkpoint",
                    why=f"checkpoints can't store the state that {self.parts} keeps",
                    fix=optimizer_choice.saved_instead(self.parts),
                    code="checkpoint",
                ),
                code=Exit.TRAINING,
            )
        where = f"; saved: {self.writer.published}" if self.writer.published else ""
        ended = Stopped(f"stopped by {self.stopped} after step {step}{where}")
        ended.together = True
        raise ended

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        check_control(control)
        self.saved_at, self.longest = time.monotonic(), 0.0
        self.stepped_at: float | None = None
        # 500 is the default of transformers
        self.every = batch_size.steps_between(self.train.save_steps or 500, state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        check_control(control)
        self.stop.step_began = time.monotonic()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        **kwargs: object,
    ) -> None:
        self.stop.step_began = None
        check_control(control)
        self.writer.check()
        if self.stepped_at is None and optimizer is not None and self.strategy != "no":
            # an error about checkpoints comes now, not at the first checkpoint
            serialization.flatten(
                deepspeed_zero.state_dict(optimizer), {}, "optimizer", lambda tensor: tensor
            )
        now, step = time.monotonic(), state.global_step
        if self.stepped_at is not None:  # the first step of this process also compiles
            self.longest = max(self.longest, now - self.stepped_at)
        self.stepped_at = now
        complete = control.should_training_stop or step >= state.max_steps
        reason = self.stop.due(step, 2 * self.longest + 2 * self.writer.seconds)
        minutes = self.strategy == "auto" and now - self.saved_at > 60 * MINUTES
        requested, minutes, self.complete = collectives.any_of(bool(reason), minutes, complete)
        control.should_training_stop = requested or self.complete
        if requested:
            self.stopped = next(filter(None, collectives.gathered(reason)))
        if (requested and not self.parts) or minutes or self.planned(step, state):
            control.should_save = self.saved = True
            self.saved_at = now

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        check_control(control)
        self.epoch_began = state.global_step

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """See callbacks that end the training between steps. transformers ends it after an empty epoch."""
        check_control(control)
        if control.should_training_stop and state.global_step > self.epoch_began:
            self.complete = True

    def planned(self, step: int, state: TrainerState) -> bool:
        """Return whether the recipe asks for a checkpoint after this step."""
        if self.strategy == "steps":
            return self.complete or step % self.every == 0
        if self.strategy == "epoch":
            return self.complete or float(state.epoch).is_integer()
        return self.strategy == "auto" and self.complete and self.saved

    def state_dict(self) -> dict[str, Any]:
        return {"complete": self.complete}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.complete = state["complete"]


def add_steps_check(
    state: TrainerState, planned: int, patience: int | None, checks: RunChecks, *, complete: bool
) -> None:
    """Count the optimizer steps that ran: all that were planned, or fewer if the run was ended early.

    Args:
        patience: of early stopping, if it ended the run.
        complete: `Schedule.complete`.
    """
    expected, actual = f"{planned}", f"{state.global_step}"
    if early := complete and state.global_step < planned:
        ended_by = "a callback" if patience is None else "early stopping"
        expected = f"at most {planned}, with {ended_by}"
        actual += ", stopped early"
        actual += " by a callback" if patience is None else f": no better evaluation in {patience}"
    checks.add(
        "steps",
        expected=expected,
        actual=actual,
        how="optimizer steps that ran",
        ok=state.global_step == planned or early,
    )
