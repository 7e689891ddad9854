"""Load the tokenizer and the examples of a recipe. This module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.adapters import continue_from
from finetune.data import chat_templates, prepared_cache
from finetune.models import model_files, tokenizer_setup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.preparation import Prepared
    from finetune.recipe.schema import Recipe


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer with the chat template that the recipe asks for."""
    template = chat_templates.read_template(recipe.data.chat_template) if recipe.data.chat_template else None
    return tokenizer_setup.load_tokenizer(recipe.model, template)


def prepare_data(recipe: Recipe) -> tuple[PreTrainedTokenizerBase, Prepared]:
    """Load the tokenizer and encode the training and validation examples."""
    from finetune.data import preparation, streaming

    tokenizer = load_tokenizer(recipe)
    if recipe.adapter.source:
        held = model_files.read_config(recipe.model).get_text_config().vocab_size
        continue_from.check_tokens(recipe.adapter, recipe.model.add_tokens, tokenizer.get_vocab(), held)
    build = streaming.stream if recipe.data.streaming else preparation.prepare
    rows, ends = (
        tokenizer_setup.vocabulary(recipe.model, tokenizer),
        tokenizer_setup.declared_ends(recipe.model),
    )
    prepared = build(recipe.data, tokenizer, recipe.train.seed, rows, ends)
    if prepared.path:
        files = model_files.tokenizer_files(recipe.model)
        prepared_cache.remember(recipe.data, recipe.train.seed, recipe.model, files, prepared.path)
    return tokenizer, prepared
