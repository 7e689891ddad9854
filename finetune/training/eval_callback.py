"""Evaluation during training (`eval.eval_steps`): keep the best weights, and stop early."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from finetune.adapters import adalora, trainable_parameters
from finetune.autoconfig import batch_size
from finetune.core.run_checks import RunChecks
from finetune.data.preparation import HeldOut, held_out
from finetune.evaluation import lm_eval_harness, scoring
from finetune.models import tokenizer_setup
from finetune.recipe.schema import Data, Eval, Recipe
from finetune.training.step_metrics import Metrics

TOLERANCE = 1e-2  # relative difference of the best loss after saving, because adapters may be rounded


class Validate(TrainerCallback):
    """Compute the validation loss and `eval.metric_for_best_model` every `eval.eval_steps` steps."""

    def __init__(
        self,
        rows: list[HeldOut],
        tokenizer: PreTrainedTokenizerBase,
        data: Data,
        settings: Eval,
        metrics: Metrics,
        not_before: int,
    ) -> None:
        """Args: not_before: first step that may be the best, because AdaLoRA first exceeds its budget."""
        self.rows, self.tokenizer, self.data, self.settings = rows, tokenizer, data, settings
        self.metrics, self.screen, self.not_before = metrics, metrics.screen, not_before
        self.higher = (
            settings.metric_for_best_model == "exact_match"
        )  # whether larger is better; a task defines it
        self.best: float | None = None
        self.best_step = self.times = self.without_better = 0
        self.best_loss = math.nan
        self.weights: dict[str, Any] = {}
        self.is_trained = False  # a first step of warm-up has the learning rate 0
        self.unsaid: dict[str, float] = {}

    @property
    def patience(self) -> int | None:
        return self.settings.early_stopping_patience

    @property
    def ran_out(self) -> bool:
        """Return whether early stopping ends the run."""
        return self.patience is not None and self.without_better >= self.patience

    def steps_between(self, state: TrainerState) -> int:
        """Return the steps between two evaluations; all steps without `eval.eval_steps`."""
        return batch_size.steps_between(self.settings.eval_steps or state.max_steps, state.max_steps)

    def state_dict(self) -> dict[str, Any]:
        counts = {"times": self.times, "without_better": self.without_better}
        best = {"best": self.best, "best_step": self.best_step, "best_loss": self.best_loss}
        more = {"higher": self.higher, "is_trained": self.is_trained}
        return {**counts, **best, **more, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: torch.optim.Optimizer,
        **kwargs: object,
    ) -> None:
        """Notice the first step that changes weights. Before it, the base model would be the best."""
        self.is_trained |= any(group["lr"] > 0 for group in optimizer.param_groups)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: PreTrainedModel | PeftModel,
        **kwargs: object,
    ) -> None:
        step, last = state.global_step, state.global_step >= state.max_steps
        if not last and step % self.steps_between(state):
            return
        started, training = time.perf_counter(), model.training
        scores = self.measure(model)
        model.train(training)
        self.times += 1
        self.unsaid, control.should_log = scores, True
        value = scores[f"eval_{self.settings.metric_for_best_model}"]
        first = self.best is None and not math.isnan(value)
        better = first or (
            self.best is not None and (value > self.best if self.higher else value < self.best)
        )
        if self.is_trained and step >= self.not_before:
            self.without_better = 0 if better else self.without_better + 1
            if better:
                self.best, self.best_step, self.best_loss = value, step, scores["eval_loss"]
                self.keep(model)
        if self.ran_out and not last:
            control.should_training_stop = control.should_log = True
            self.screen.say(f"note: stopped at step {step}: no better evaluation in {self.patience}")
        seconds = time.perf_counter() - started
        self.metrics.pause(seconds)
        if state.is_world_process_zero:
            self.write(step, state.epoch, scores, seconds)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Add the results to the step's log, which the trackers get later."""
        logs.update(self.unsaid)
        self.unsaid = {}

    def measure(self, model: PreTrainedModel | PeftModel) -> dict[str, float]:
        """Compute the validation loss and the deciding metric, and restore the random generators."""
        asks = self.settings.metric_for_best_model == "exact_match"
        with torch.compiler.set_stance("force_eager"):  # evaluation has other shapes, which would be compiled
            score = scoring.score(model, self.tokenizer, self.rows, self.data, self.settings, answers=asks)
        scores = {"eval_loss": score.loss}
        if asks:
            share: Any = score.as_json()[
                "exact_match"
            ]  # `text_limits.check_metric` has checked that there is one
            scores["eval_exact_match"] = share
        if "/" in self.settings.metric_for_best_model:
            task, _, metric = self.settings.metric_for_best_model.rpartition("/")
            settings = lm_eval_harness.of_task(self.settings, task)
            with torch.compiler.set_stance("force_eager"):
                results = lm_eval_harness.run(
                    model, self.tokenizer, settings, seeded=False, date=self.data.template_date
                )
            scores[f"eval_{self.settings.metric_for_best_model}"], self.higher = lm_eval_harness.one(
                results, task, metric
            )
        return scores

    def keep(self, model: nn.Module) -> None:
        """Copy the trainable weights to CPU memory."""
        if self.settings.load_best_model_at_end:
            trained = trainable_parameters.trainable(model)
            self.weights = {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}

    def write(self, step: int, epoch: float, scores: dict[str, float], seconds: float) -> None:
        best = "  best so far" if self.best_step == step else ""
        said = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        self.screen.say(f"step {step}: {said}{best}")
        kept = {"best_step": self.best_step} if self.weights else {}  # whose weights are saved at the end
        self.metrics.append({"step": step, "epoch": epoch, **scores, "eval_seconds": seconds, **kept})

    def restore(self, model: nn.Module, state: TrainerState, checks: RunChecks) -> None:
        """Restore the best weights, and add a run check that counts the evaluations."""
        every, last = self.steps_between(state), state.max_steps
        expected = sum(step % every == 0 or step == last for step in range(1, state.global_step + 1))
        checks.add("eval.eval_steps", expected, self.times, "evaluations that ran")
        if not self.weights:
            return
        for name, parameter in trainable_parameters.trainable(model).items():
            with torch.no_grad():  # a change of `.data` would not update DoRA's norms
                parameter.copy_(self.weights[name])

    def add_run_check(self, loss: float, checks: RunChecks) -> None:
        """Add a run check that the loss of the saved weights equals the best evaluation loss."""
        if self.weights:
            checks.add(
                "best weights saved",
                expected=f"step {self.best_step}, validation loss {self.best_loss:.6f}",
                actual=f"{loss:.6f}",
                how="validation loss of the saved weights, reopened",
                ok=math.isclose(loss, self.best_loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE),
            )


def validation_callbacks(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    adapted: nn.Module,
    metrics: Metrics,
) -> list[Validate]:
    """Return the callback for evaluation during training, if `eval.eval_steps` is set."""
    if recipe.eval.eval_steps is None:
        return []
    ends = tokenizer_setup.declared_ends(recipe.model)
    rows, _ = held_out(recipe.data, tokenizer, recipe.train.seed, ends)  # the run has shown the notes
    config: Any = getattr(adapted, "peft_config", {}).get("default")
    # before this step, the ranks exceed the budget
    in_budget: int = config.total_step - config.tfinal if adalora.allocates(adapted) else 0
    return [Validate(rows, tokenizer, recipe.data, recipe.eval, metrics, in_budget)]
