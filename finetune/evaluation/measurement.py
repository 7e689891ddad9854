"""Evaluate one model on everything that a recipe selects."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from accelerate import PartialState
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from finetune.core import progress
from finetune.core.console import Console
from finetune.core.errors import Problem, UserError
from finetune.data.preparation import HeldOut
from finetune.evaluation import lm_eval_harness, scoring
from finetune.evaluation.results import Measured
from finetune.recipe.schema import Recipe
from finetune.run_folder.run_folder import RunFolder


def measure(
    requested: PreTrainedModel | PeftModel,
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
                    requested, tokenizer, rows, recipe.data, settings, answers=settings.generate
                )
        if texts:
            with part(f"loss of {len(texts):,} general texts"):
                general = scoring.score_texts(requested, tokenizer, texts, settings)
        if settings.tasks and settings.engine == "hf":
            with part(f"tasks {', '.join(settings.tasks)}"):
                found = lm_eval_harness.run(requested, tokenizer, settings, date=recipe.data.template_date)
    return Measured(score, general, found, time.perf_counter() - started)


def by_vllm(
    folder: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evaluate `eval.tasks` on base model and fine-tuned model with vLLM, which serves the saved adapter."""
    rank = getattr(recipe.adapter, "r", None)
    plain = recipe.adapter.type in ("lora", "rslora") and recipe.model.quantization in ("auto", "none")
    if folder.weights != folder.adapter or not plain:
        raise UserError(
            Problem(
                "vLLM can't run this adapter",
                "eval.engine",
                found=f"{recipe.adapter.type} with model.quantization {recipe.model.quantization}",
                expected="type lora or rslora on a base model in bf16",
                fix="engine: hf",
                code="eval-setting",
            )
        )
    engine = lm_eval_harness.vllm(recipe.model.name, recipe.model.revision, str(folder.adapter), rank or 8)
    after = lm_eval_harness.run(engine, tokenizer, recipe.eval)
    engine.lora_request = None
    return lm_eval_harness.run(engine, tokenizer, recipe.eval), after


def show_progress(screen: Console | None, what: str) -> AbstractContextManager[None]:
    """Show the progress of one part on the screen of the main process, or of the surrounding phase."""
    return progress.phase(screen if PartialState().is_main_process else None, what)
