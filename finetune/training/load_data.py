"""Load the tokenizer and the examples of a recipe. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.data import prepared_cache
from finetune.evaluation import text_limits
from finetune.models import model_files, token_limits
from finetune.preflight import loss_weight_checks, token_checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.preparation import Prepared
    from finetune.recipe.schema import Recipe


def prepare_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """Load the tokenizer and encode the training and validation examples."""
    from finetune.data import preparation, streaming

    tokens = token_checks.load_model_tokens(recipe)
    build = streaming.stream if recipe.data.streaming else preparation.prepare
    prepared = build(recipe.data, tokens.tokenizer, recipe.train.seed, tokens.rows, tokens.ends)
    prepared.report["train"].notes += [tokens.note] if tokens.note else []
    loss_weight_checks.check(recipe, prepared.report["train"])
    prompt = prepared.report["validation"].longest_prompt
    token_limits.room_for_answer(prompt, tokens.longest, recipe.eval)
    text_limits.check_metric(recipe.eval, prompt)
    if prepared.path:
        files = model_files.tokenizer_files(recipe.model)
        prepared_cache.remember(recipe.data, recipe.train.seed, recipe.model, files, prepared.path)
    return tokens.tokenizer, prepared
