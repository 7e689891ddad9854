"""Evaluation during training (`eval.eval_steps`): keep the best weights, and stop early."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from finetune.adapters import adalora, trainable_parameters
from finetune.data.preparation import held_out
from finetune.evaluation import lm_eval_harness, scoring

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from transformers import PreTrainedTokenizerBase, TrainerControl, TrainerState, TrainingArguments

    from finetune.core.run_checks import RunChecks
    from finetune.data.preparation import HeldOut
    from finetune.recipe.schema import Data, Eval, Recipe
    from finetune.training.step_metrics import Metrics

TOLERANCE = 1e-2  # relative, of the best loss measured again when all is saved: adapters may be rounded then


class Validate(TrainerCallback):
    """Every `eval.eval_steps` steps and at the last: validation loss, and `eval.metric_for_best_model`."""

    def __init__(
        self,
        rows: list[HeldOut],
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        settings: Eval,
        metrics: Metrics,
        not_before: int,
    ) -> None:
        """Args: not_before: a step before which nothing is the best: AdaLoRA is still over its budget."""
        self.rows, self.tokenizer, self.data, self.settings = rows, tokenizer, data, settings
        self.metrics, self.screen, self.not_before = metrics, metrics.screen, not_before
        self.higher = (
            settings.metric_for_best_model == "exact_match"
        )  # more of it is better; a task says so itself
        self.best: float | None = None
        self.best_step = self.times = self.without_better = 0
        self.best_loss = math.nan
        self.weights: dict[str, Any] = {}
        self.unsaid: dict[str, float] = {}

    @property
    def patience(self) -> int | None:
        return self.settings.early_stopping_patience

    @property
    def ran_out(self) -> bool:
        """Whether early stopping ends the run."""
        return self.patience is not None and self.without_better >= self.patience

    def state_dict(self) -> dict[str, Any]:
        counts = {"times": self.times, "without_better": self.without_better}
        best = {"best": self.best, "best_step": self.best_step, "best_loss": self.best_loss}
        return {**counts, **best, "higher": self.higher, "weights": self.weights}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        for name, value in kept.items():
            setattr(self, name, value)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: object,
    ) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        if not last and (self.settings.eval_steps is None or step % self.settings.eval_steps):
            return
        started, training = time.perf_counter(), model.training
        found = self.measure(model)
        model.train(training)
        self.times += 1
        self.unsaid, control.should_log = found, True
        value = found[f"eval_{self.settings.metric_for_best_model}"]
        first = self.best is None and not math.isnan(value)
        better = first or (
            self.best is not None and (value > self.best if self.higher else value < self.best)
        )
        if step >= self.not_before:
            self.without_better = 0 if better else self.without_better + 1
            if better:
                self.best, self.best_step, self.best_loss = value, step, found["eval_loss"]
                self.keep(model)
        if self.ran_out and not last:
            control.should_training_stop = control.should_log = True
            self.screen.say(f"note: stopped at step {step}: no better evaluation in {self.patience}")
        seconds = time.perf_counter() - started
        self.metrics.pause(seconds)
        if state.is_world_process_zero:
            self.write(step, state.epoch, found, seconds)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        **kwargs: object,
    ) -> None:
        """Trackers, which come later, hear it with the step's loss."""
        logs.update(self.unsaid)
        self.unsaid = {}

    def measure(self, model: Any) -> dict[str, float]:
        """The validation loss and the metric that decides; random generators stay as they are."""
        asks = self.settings.metric_for_best_model == "exact_match"
        with torch.compiler.set_stance("force_eager"):  # shapes of its own, which would be compiled for
            score = scoring.score(model, self.tokenizer, self.rows, self.data, self.settings, answers=asks)
        found = {"eval_loss": score.loss}
        if asks:
            share: Any = score.as_json()[
                "exact_match"
            ]  # `text_limits.check_metric` saw to it that there is one
            found["eval_exact_match"] = share
        if "/" in self.settings.metric_for_best_model:
            task, _, metric = self.settings.metric_for_best_model.rpartition("/")
            asked = lm_eval_harness.of_task(self.settings, task)
            with torch.compiler.set_stance("force_eager"):
                date = self.data.template_date
                results = lm_eval_harness.run(model, self.tokenizer, asked, seeded=False, date=date)
            found[f"eval_{self.settings.metric_for_best_model}"], self.higher = lm_eval_harness.one(
                results, task, metric
            )
        return found

    def keep(self, model: Any) -> None:
        """Copy what is trained to the host."""
        if self.settings.load_best_model_at_end:
            trained = trainable_parameters.trainable(model)
            self.weights = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}

    def write(self, step: int, epoch: float, found: dict[str, float], seconds: float) -> None:
        best = "  best so far" if self.best_step == step else ""
        said = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        self.screen.say(f"step {step}: {said}{best}")
        record = {"step": step, "epoch": epoch, **found, "eval_seconds": seconds}
        self.metrics.append(record)

    def restore(self, model: nn.Module, state: Any, ledger: RunChecks) -> None:
        """Put the best weights back, and add a run check that counts the evaluations."""
        steps = state.global_step
        every = self.settings.eval_steps or steps
        asked = sum(step % every == 0 or step == steps for step in range(1, steps + 1))
        how = "evaluations that ran"
        ledger.add("eval.eval_steps", asked, self.times, how)
        if not self.weights:
            return
        for name, parameter in trainable_parameters.trainable(model).items():
            with torch.no_grad():  # not on `.data`: it counts as a change, which DoRA's norms follow
                parameter.copy_(self.weights[name])

    def add_receipt(self, loss: float, ledger: RunChecks) -> None:
        """The loss of the saved weights is the best evaluation's."""
        if self.weights:
            ok = math.isclose(loss, self.best_loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
            asked = f"step {self.best_step}, validation loss {self.best_loss:.6f}"
            how = "validation loss of the saved weights, reopened"
            ledger.add("best weights kept", asked, f"{loss:.6f}", how, ok=ok)


def asked(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    adapted: nn.Module,
    metrics: Metrics,
    declared: Collection[int] = (),
) -> list[Validate]:
    """The evaluation while training, if `eval.eval_steps` asks for one."""
    if recipe.eval.eval_steps is None:
        return []
    rows = held_out(recipe.data, tokenizer, recipe.train.seed, declared)
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    # before its budget is reached it has more ranks than were asked for
    in_budget: int = config.total_step - config.tfinal if adalora.allocates(adapted) else 0
    return [Validate(rows, tokenizer, recipe.data, recipe.eval, metrics, in_budget)]
