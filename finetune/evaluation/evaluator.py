"""Compare base model and fine-tuned model from the run folder: `finetune evaluate RUN`.

Both models are evaluated on the same examples: the validation set (loss and greedy answers), general texts
(forgetting), and `eval.tasks` with lm-eval. Each difference has a 95 % interval, and the evaluation ends with
one verdict.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from transformers import PreTrainedModel

from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.distributed import collectives
from finetune.evaluation import (
    lm_eval_harness,
    measurement,
    reopen,
    results,
    scoring,
    tasks,
    text_limits,
    training_examples,
    validation_set,
    verdicts,
)
from finetune.evaluation.results import Measured
from finetune.hardware import detection
from finetune.run_folder import run_folder


def run(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    verify_reopened: Callable[[Any], None] | None = None,
    screen: Console | None = None,
) -> dict[str, Any]:
    """Reload a run folder, evaluate base model and fine-tuned model, and write eval.json.

    Args:
        path: the run folder.
        overrides: overrides of its recipe, such as `eval.tasks=[arc_easy]`, or `model.name=...` if the base
            model has another path.
        verify_reopened: called with the reloaded model before evaluation. It can raise an error.
        screen: prints the start of each part, because a part can take minutes.

    Returns:
        The content of eval.json. Without a validation set, `base` and `tuned` are empty.

    Raises:
        UserError: the run is not finished, or the folder cannot be written (exit 2).
    """
    folder = run_folder.open_run(path)
    if not os.access(folder.path, os.W_OK):
        raise UserError(
            Problem(
                "finetune can't write to the run folder",
                where=str(folder.path),
                fix="copy the run folder to a writable place and evaluate the copy",
                why="the evaluation stores its results there",
                code="path",
            )
        )
    recipe = run_folder.recipe_of(folder, overrides)
    validation_set.check_not_drawn_again(recipe)
    for name in run_folder.EVALUATIONS:
        folder.found(name)  # report a damaged file now, not after hours of evaluation
    collectives.joined(detection.detect().device)
    lm_eval_harness.check(recipe.eval, recipe.model)
    texts = tasks.general_texts(recipe.eval)
    with measurement.show_progress(screen, "loading the fine-tuned model"):
        tuned: Any = reopen.reopen(folder, recipe)
    if verify_reopened:
        verify_reopened(tuned)
    tokenizer = reopen.tokenizer_of(folder)
    stops = scoring.stops(tuned, tokenizer)
    rows, notes = validation_set.held_out(folder, recipe, tokenizer)
    with measurement.show_progress(screen, "comparing the validation set with the training data"):
        notes += training_examples.notes(folder, recipe, [row.example for row in rows])
    notes += text_limits.check_model(recipe, tokenizer, tuned)
    texts = text_limits.predicted(texts, tokenizer)
    collectives.agree(results.content_hashes(rows, texts, recipe.eval))
    notes += reopen.notes(recipe, tokenizer)

    def say(what: str) -> None:
        if screen and PartialState().is_main_process:
            screen.say(f"{what} ...")

    def measured(requested: PreTrainedModel | PeftModel, which: str) -> Measured:
        def part(what: str) -> AbstractContextManager[None]:
            say(f"{which}: {what}")
            return measurement.show_progress(screen, f"{which}: {what}")

        return measurement.measure(requested, tokenizer, rows, texts, recipe, part)

    after, before = measured(tuned, "fine-tuned model"), None
    if reopen.base_stands(tuned):
        with tuned.disable_adapter():
            before = measured(tuned, "base model")
    tuned = None
    clear_device_cache(garbage_collection=True)
    if not before:
        with measurement.show_progress(screen, "loading the base model"):
            base = reopen.open_base(recipe)
        before = measured(base, "base model")
        del base
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        say(f"fine-tuned and base model: tasks {', '.join(recipe.eval.tasks)}")
        with measurement.show_progress(screen, "tasks with vLLM"):
            before.tasks, after.tasks = measurement.by_vllm(folder, recipe, tokenizer)
    result = results.content(rows, before, after, recipe.eval, notes, texts)
    result["settings"]["stops"] = stops
    result["settings"]["model"] = run_folder.named(recipe.model.name, recipe.model.revision)
    result["settings"]["storage"] = reopen.setup_of(recipe).storage.value
    apart = results.differences_from_run(folder, recipe, result)
    result["settings"]["notes"] += apart
    name = (
        results.OTHER if apart or validation_set.overridden(recipe) else "eval.json"
    )  # eval.json keeps the run's own result
    results.keep_earlier_tasks(folder, name, result)
    result["verdict"] = verdicts.verdict(result)
    if PartialState().is_main_process:
        folder.write(name, result)
    return result
