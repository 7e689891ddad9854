"""Render and encode the first examples as training does: `finetune check`.

transformers takes seconds to load a tokenizer, so finetune first reads the files without transformers. If the
files are not clear, or an example fails, finetune loads the tokenizer, and the tokenizer decides.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.adapters import continue_from
from finetune.autoconfig import batch_size
from finetune.core.errors import UserError
from finetune.data import chat_templates, example_errors
from finetune.evaluation import text_limits
from finetune.models import (
    architecture,
    model_class,
    model_files,
    token_limits,
    tokenizer_files,
    tokenizer_setup,
)
from finetune.preflight import loss_weight_checks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.recipe.schema import Data, Recipe


def check(recipe: Recipe) -> list[str]:
    """Refuse data with too many bad examples among the first `FIRST` examples of each source.

    Returns:
        Notes.

    Raises:
        UserError: more bad examples than `data.expect` allows (exit 2).
    """
    folder = Path(recipe.model.name)
    if not folder.is_dir():
        return []
    config = architecture.config_in(folder / "config.json")
    if model_class.unsupported(config):  # another check refuses the model
        return []
    longest = token_limits.positions(config)
    notes = []
    if longest is not None and longest < recipe.data.max_length:
        notes = [f"data.max_length: the model has {longest} positions, so longer examples do not fit"]
    vocabulary, limit = getattr(config.get_text_config(), "vocab_size", None), token_limits.text_limit(config)
    if vocabulary is None:  # the config has no vocabulary size; the run reads it from the model
        return notes
    doubt = tokenizer_files.has_id(folder, vocabulary) or (limit is not None and _may_be_cut(recipe, limit))
    files: Any = None if doubt else tokenizer_files.read(recipe.model, _template(recipe.data))
    if files:
        with contextlib.suppress(UserError):  # transformers may read these files in another way
            added = map(files.backend_tokenizer.token_to_id, recipe.model.add_tokens)
            rows = max([vocabulary, *(token + 1 for token in added)])
            token_limits.apply(files, config, rows)
            ends = tokenizer_setup.declared_ends(recipe.model, config)
            return [*notes, *_audit(recipe, ModelTokens(files, rows, ends, longest, ""))]
    tokens = load_model_tokens(recipe)
    long, date = _audit(recipe, tokens), recipe.data.template_date
    notes += text_limits.check(recipe.eval, tokens.tokenizer, tokens.rows, limit, date, with_hub=False)
    return [*notes, *filter(None, (tokens.note,)), *long]


def _audit(recipe: Recipe, tokens: ModelTokens) -> list[str]:
    """Render and encode the first examples as training does. Return notes on steps and long examples."""
    from finetune.data import preparation

    settings, effective = recipe.eval, recipe.train.effective_batch_size
    first = preparation.check_first(
        recipe.data, tokens.tokenizer, recipe.train.seed, tokens.rows, tokens.ends, example_errors.FIRST
    )
    prompt = first.validation.report.longest_prompt
    token_limits.room_for_answer(prompt, tokens.longest, settings)
    if first.is_all_validation:
        text_limits.check_metric(settings, prompt)
    notes = []
    if first.sequences is not None:
        if first.sequences < effective:
            raise UserError(batch_size.too_few(first.sequences, effective))
        steps = math.ceil(first.sequences / effective) * recipe.train.epochs
        notes = batch_size.few_steps(recipe.train, math.ceil(steps))
    loss_weight_checks.check(recipe, first.train.report)
    reports = {"training": first.train.report, "validation": first.validation.report}
    long = [note for report in reports.values() for kind, note in report.noted() if kind == "too_long"]
    empty = [text for which, report in reports.items() if (text := report.nothing_kept(which))]
    return [*notes, *long, *empty]


def load_with_template(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Load the tokenizer with the chat template of the recipe."""
    return tokenizer_setup.load_tokenizer(recipe.model, _template(recipe.data))


def _template(data: Data) -> str | None:
    return chat_templates.read_template(data.chat_template) if data.chat_template else None


class ModelTokens(NamedTuple):
    """The tokenizer of a model, with the limits of the model."""

    tokenizer: PreTrainedTokenizerBase
    rows: int
    """The size of the vocabulary: the rows of the model's embedding."""
    ends: set[int]
    """The tokens that end an answer."""
    longest: int | None
    """The number of positions; `None` without a limit."""
    note: str
    """Why the padding token had to change."""


def load_model_tokens(recipe: Recipe) -> ModelTokens:
    """Load the tokenizer, and limit it to its model."""
    tokenizer, config = load_with_template(recipe), model_files.read_config(recipe.model)
    if recipe.adapter.source:
        held = config.get_text_config().vocab_size
        continue_from.check_tokens(recipe.adapter, recipe.model.add_tokens, tokenizer.get_vocab(), held)
    rows = tokenizer_setup.vocabulary(recipe.model, tokenizer, config)
    note = token_limits.apply(tokenizer, config, rows)
    ends = tokenizer_setup.declared_ends(recipe.model, config)
    return ModelTokens(tokenizer, rows, ends, token_limits.positions(config), note)


def check_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse texts of the evaluation with token ids that the model does not have (exit 2).

    The evaluation itself counts the texts that it truncates.
    """
    config = model_files.read_config(recipe.model)
    rows, limit = tokenizer_setup.vocabulary(recipe.model, tokenizer, config), token_limits.text_limit(config)
    text_limits.check(recipe.eval, tokenizer, rows, limit, recipe.data.template_date)


def _may_be_cut(recipe: Recipe, limit: int) -> bool:
    """Return whether a text of the evaluation may have more tokens than the model has positions."""
    found = text_limits.longest_texts(recipe.eval)
    found = [(text, beside) for text, beside in found if len(text.encode()) + beside > limit]
    tokenizer = tokenizer_setup.read_tokenizer(recipe.model) if found else None
    return any(
        tokenizer is None or len(tokenizer.encode(text).ids) + beside > limit for text, beside in found
    )
