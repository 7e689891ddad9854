"""Compare base model and fine-tuned model from the run folder: `finetune evaluate RUN`.

Both models are evaluated on the same examples: the validation set (loss and greedy answers), general texts
(forgetting), and `eval.tasks` with lm-eval. Each difference has a 95 % interval, and the evaluation ends with
one verdict.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from accelerate.utils.memory import clear_device_cache

from finetune.core import progress
from finetune.core.errors import Problem, UserError
from finetune.distributed import collectives
from finetune.evaluation import (
    lm_eval_harness,
    reopen,
    results,
    scoring,
    tasks,
    text_limits,
    validation_set,
    verdicts,
)
from finetune.evaluation.results import Measured
from finetune.hardware import detection
from finetune.models import generation_config, token_limits, tokenizer_setup
from finetune.run_folder import comparability, run_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import PreTrainedTokenizerBase

    from finetune.core.console import Console
    from finetune.data.preparation import HeldOut
    from finetune.recipe.schema import Recipe
    from finetune.run_folder.run_folder import RunFolder

# For other examples than the run's validation set, or for another base model
OTHER = "eval.other.json"


def run(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    inspect: Callable[[Any], None] | None = None,
    screen: Console | None = None,
) -> dict[str, Any]:
    """Reload a run folder, evaluate base model and fine-tuned model, and write eval.json.

    Args:
        path: the run folder.
        overrides: overrides of its recipe, such as `eval.tasks=[arc_easy]`, or `model.name=...` if the base
            model has another path.
        inspect: called with the reloaded model before evaluation. It can raise an error.
        screen: prints the start of each part, because a part can take minutes.

    Returns:
        The content of eval.json. Without a validation set, `base` and `tuned` are empty.

    Raises:
        UserError: the run is not finished, or the folder cannot be written (exit 2).
    """
    folder = run_folder.open_run(path)
    if not os.access(folder.path, os.W_OK):
        what, why = "finetune can't write to the run folder", "the evaluation stores its results there"
        fix = "copy the run folder to a writable place and evaluate the copy"
        raise UserError(Problem(what, where=str(folder.path), fix=fix, why=why, code="path"))
    recipe = run_folder.recipe_of(folder, overrides)
    for name in run_folder.EVALUATIONS:
        folder.found(name)  # report a damaged file now, not after hours of evaluation
    collectives.joined(detection.detect().device)
    lm_eval_harness.check(recipe.eval, recipe.model)
    texts = tasks.general_texts(recipe.eval)
    tuned: Any = reopen.reopen(folder, recipe)
    if inspect:
        inspect(tuned)
    tokenizer = reopen.tokenizer_of(folder)
    declared = sorted(generation_config.declared_stops(tuned.generation_config))
    stops = {"answers": scoring.stop_ids(tuned, tokenizer), "model": declared}
    rows, notes = validation_set.held_out(folder, recipe, tokenizer)
    known, longest = tuned.get_input_embeddings().weight.shape[0], token_limits.text_limit(tuned.config)
    notes += [
        *text_limits.check(recipe.eval, tokenizer, known, longest, recipe.data.template_date),
        *reopen.storage_note(recipe),
        *tokenizer_setup.foreign_template(recipe.model, tokenizer),
    ]

    def say(what: str) -> None:
        if screen and PartialState().is_main_process:
            screen.say(f"{what} ...")

    def measured(asked: Any, which: str) -> Measured:
        def part(what: str) -> AbstractContextManager[None]:
            say(f"{which}: {what}")
            return progress.phase(screen if PartialState().is_main_process else None, f"{which}: {what}")

        return measure(asked, tokenizer, rows, texts, recipe, part)

    after, before = measured(tuned, "fine-tuned model"), None
    if reopen.base_stands(tuned):
        with tuned.disable_adapter():
            before = measured(tuned, "base model")
    tuned = None
    clear_device_cache(garbage_collection=True)
    if not before:
        before = measured(reopen.open_base(recipe), "base model")
    if recipe.eval.engine == "vllm" and recipe.eval.tasks:
        say(f"fine-tuned and base model: tasks {', '.join(recipe.eval.tasks)}")
        before.tasks, after.tasks = by_vllm(folder, recipe, tokenizer)
    result = results.content(rows, before, after, recipe.eval, notes, texts)
    result["settings"]["stops"] = stops
    result["settings"]["model"] = run_folder.named(recipe.model.name, recipe.model.revision)
    result["settings"]["storage"] = reopen.setup_of(recipe).storage.value
    apart = others(folder, recipe, result)
    result["settings"]["notes"] += apart
    name = (
        OTHER if apart or validation_set.overridden(recipe) else "eval.json"
    )  # eval.json keeps the run's own result
    result["tasks"] = {**_earlier(folder, name, result), **result["tasks"]}
    result["verdict"] = verdicts.verdict(result)
    if PartialState().is_main_process:
        folder.write(name, result)
    return result


def measure(
    asked: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[HeldOut],
    texts: list[str],
    recipe: Recipe,
    part: Callable[[str], AbstractContextManager[None]],
) -> Measured:
    """Evaluate one model on everything the recipe selects.

    Args:
        part: prints what is evaluated next, and shows the progress.
    """
    started, settings = time.perf_counter(), recipe.eval
    score, general, found = None, None, {}
    with scoring.memory_errors():
        if rows:
            with part(f"loss{' and answers' * settings.generate} of {len(rows):,} validation examples"):
                score = scoring.score(
                    asked, tokenizer, rows, recipe.data, settings, answers=settings.generate
                )
        if texts:
            with part(f"loss of {len(texts):,} general texts"):
                general = scoring.score_texts(asked, tokenizer, texts, settings)
        if settings.tasks and settings.engine == "hf":
            with part(f"tasks {', '.join(settings.tasks)}"):
                found = lm_eval_harness.run(asked, tokenizer, settings, date=recipe.data.template_date)
    return Measured(score, general, found, time.perf_counter() - started)


def by_vllm(
    folder: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evaluate `eval.tasks` on base model and fine-tuned model with vLLM, which serves the saved adapter."""
    rank = getattr(recipe.adapter, "r", None)
    plain = recipe.adapter.type in ("lora", "rslora") and recipe.model.quantization in ("auto", "none")
    if folder.weights != folder.adapter or not plain:
        what, expected = "vLLM can't run this adapter", "type lora or rslora on a base model in bf16"
        found = f"{recipe.adapter.type} with model.quantization {recipe.model.quantization}"
        raise UserError(Problem(what, "eval.engine", "", found, expected, "engine: hf", code="eval-setting"))
    engine = lm_eval_harness.vllm(recipe.model.name, recipe.model.revision, str(folder.adapter), rank or 8)
    after = lm_eval_harness.run(engine, tokenizer, recipe.eval)
    engine.lora_request = None
    return lm_eval_harness.run(engine, tokenizer, recipe.eval), after


def others(folder: RunFolder, recipe: Recipe, result: dict[str, Any]) -> list[str]:
    """Return why this result is not about the run's own weights.

    The base model can be stored in another format than in training. Or the overrides name another base model,
    which its validation loss shows.
    """
    origin, now = recipe.origin.set_by, result["settings"]["storage"]
    own = comparability.resolved(folder).get("model.storage", ("", ""))[0].strip('"')
    # format 1 could request bf16 under any precision; today `none` means the precision of the launch
    in_bf16 = folder.format_version == 1 and own == "bf16" and recipe.model.quantization == "none"
    if (in_bf16 or origin.get("model.quantization") == "override") and now != own:
        was = f"this run used {own}" if own else "the run does not say what it used"
        return [f"this evaluation stores the base model in {now}, but {was}"]
    asked = any(who == "override" and key.startswith("model.") for key, who in origin.items())
    earlier = folder.found("eval.json")
    if validation_set.overridden(recipe) or not asked or _same_base(earlier, result) is not False:
        return []
    losses = [one["base"]["loss"] for one in (result, earlier)]
    text = "this is not the base model of the run: the validation loss is {:.4f} in place of {:.4f}"
    return [text.format(*losses)]


def _same_base(earlier: dict[str, Any], now: dict[str, Any]) -> bool | None:
    """Return whether two evaluations have the same base model, by its validation loss.

    `None` if not known.
    """
    losses = [one.get("base", {}).get("loss") for one in (earlier, now)]
    rows = [one.get("settings", {}).get("rows") for one in (earlier, now)]
    return None if None in losses or rows[0] != rows[1] else comparability.near(*losses)


def _earlier(folder: RunFolder, name: str, now: dict[str, Any]) -> dict[str, Any]:
    """Return the tasks of an earlier evaluation on the same base model that were not repeated now.

    For another base model than the run's, the same name is not sufficient.
    """
    earlier = folder.found(name)
    was, same, strict = earlier.get("settings", {}), _same_base(earlier, now), name == OTHER
    keys = ("model", "storage") if strict else ("model",)
    alike = all(was.get(key) == now["settings"][key] for key in keys)
    if not alike or not (same if strict else same is not False):
        return {}
    gone = {*now["tasks"], results.GENERAL}  # the general texts are evaluated each time, or are not wanted
    return {name: _tested(task) for name, task in earlier.get("tasks", {}).items() if name not in gone}


def _tested(task: dict[str, Any]) -> dict[str, Any]:
    """Remove the verdict of an older evaluation's task if it has no p-value."""
    for change in task.get("difference", {}).values():
        if "p" not in change:
            change.pop("verdict", None)
    return task
