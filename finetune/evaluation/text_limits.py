"""Check the texts of an evaluation against the model's token ids and positions.

This module needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.core.errors import Problem, UserError, raise_if_any
from finetune.core.formatting import listed
from finetune.data import template_sandbox
from finetune.evaluation import tasks
from finetune.models import token_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from finetune.recipe.schema import Eval, Recipe

MOST_SHOWN = 3
SPECIAL, A_CHAT = 8, 256  # tokens that a tokenizer or a chat template can add to a text


class _Text(NamedTuple):
    """A text of an evaluation."""

    where: str
    readings: list[str]
    """The strings to encode: the prompt alone, and the prompt with each choice."""
    room: int = 0
    """Number of tokens that are generated after it."""
    has_prefix: bool = False
    """Whether lm-eval adds its prefix token (BOS, or EOS without a BOS token)."""


def check_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, model: Any) -> list[str]:
    """Check the texts of an evaluation against a loaded model, as `check` does."""
    rows, longest = model.get_input_embeddings().weight.shape[0], token_limits.text_limit(model.config)
    return check(recipe.eval, tokenizer, rows, longest, recipe.data.template_date)


def check(
    settings: Eval,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    longest: int | None,
    date: str | None = None,
    *,
    with_hub: bool = True,
) -> list[str]:
    """Check every text that measures forgetting, and every text of the tasks.

    Args:
        rows: the number of rows of the embedding.
        longest: the number of positions. `None` if the config names no limit.
        date: the date that chat templates see.
        with_hub: read also the tasks of lm-eval, whose data is on the Hub.

    Returns:
        Notes with the number of texts that the evaluation cuts.

    Raises:
        UserError: a text has token ids outside the embedding (exit 2).
    """
    notes, problems = [], []
    texts = [_Text(f"text {number}", [text]) for number, text in enumerate(tasks.general_texts(settings), 1)]
    beyond, long = _measure(texts, tokenizer, rows, longest)
    problems += _unknown_ids(beyond, "eval.forgetting", rows)
    short = len(texts) - len(predicted([text.readings[0] for text in texts], tokenizer))
    if short and short == len(texts):
        problems.append(_no_token(settings))
    elif short:
        skipped = f"eval.forgetting: finetune skips {short:,} of {len(texts):,} texts"
        notes.append(f"{skipped}, because they have fewer than two tokens")
    if long:
        notes.append(
            f"eval.forgetting: {long:,} of {len(texts):,} texts have more than {longest:,} tokens, the "
            f"model's maximum. finetune uses their first {longest:,} tokens"
        )
    for name in filter(tasks.is_file, dict.fromkeys(settings.tasks)):
        task = tasks.read(name)
        if not task:
            continue
        prompts = list(_texts(task, name, tokenizer, date))
        beyond, long = _measure(prompts, tokenizer, rows, longest)
        problems += _unknown_ids(beyond, "eval.tasks", rows)
        problems += _long_choices(prompts, tokenizer, longest) if long else []
        # lm-eval reads the texts of a perplexity task window by window
        if long and task.kind != "perplexity":
            notes.append(
                f"eval.tasks: {task.task}: {long:,} of {len(prompts):,} prompts with their answers have more "
                f"than {longest:,} tokens, the model's maximum. lm-eval cuts the start of these prompts"
            )
    problems += _of_lm_eval(settings, tokenizer, rows, date, with_hub)
    raise_if_any(problems)
    return notes


def predicted(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts with a token to predict, which the first token of a text is not."""
    return [text for text in texts if len(tokenizer(text)["input_ids"]) > 1]


def check_metric(settings: Eval, longest_prompt: int) -> None:
    """Raise a UserError if exact match selects the model but no validation example has a prompt (exit 2)."""
    if (
        settings.eval_steps is not None
        and settings.metric_for_best_model == "exact_match"
        and not longest_prompt
    ):
        raise UserError(
            Problem(
                "no validation example has a prompt that asks for an answer",
                "eval.metric_for_best_model",
                found="exact_match",
                fix="metric_for_best_model: loss",
                why="exact match compares answers",
                code="eval-setting",
            )
        )


def longest_texts(settings: Eval) -> list[tuple[str, int]]:
    """Return each text of an evaluation, with the number of tokens to add for an answer or chat markers."""
    found = [(text, SPECIAL) for text in tasks.general_texts(settings)]
    for name in filter(tasks.is_file, dict.fromkeys(settings.tasks)):
        task = tasks.read(name)
        if not task or task.kind == "perplexity":
            continue
        beside = (A_CHAT if task.chat else SPECIAL) + (
            task.max_new_tokens if task.kind in tasks.GENERATED else 0
        )
        for document in tasks.documents(task, name):
            choices = document.get("choices") or [""]
            found += [(f"{document['prompt']}{task.delimiter}{choice}", beside) for choice in choices]
    return found


def _texts(
    task: tasks.Task, name: str, tokenizer: PreTrainedTokenizerBase, date: str | None
) -> Iterator[_Text]:
    """Yield the texts of a task."""
    room = task.max_new_tokens if task.kind in tasks.GENERATED else 0
    documents = tasks.documents(task, name)
    prompts = [document["prompt"] for document in documents]
    if task.chat and tokenizer.chat_template:
        chats = [([{"role": "user", "content": prompt}], None) for prompt in prompts]
        between = tasks.answer_lead(tokenizer, date)
        options: Any = {**tokenizer.special_tokens_map}
        template = template_sandbox.ChatTemplate(tokenizer.get_chat_template(), options, date)
        made = template_sandbox.render(template, chats, prompt=True)
        prompts = [one.text or prompt for one, prompt in zip(made, prompts, strict=True)]
    between = task.delimiter
    for number, (prompt, document) in enumerate(zip(prompts, documents, strict=True), 1):
        choices = [f"{prompt}{between}{choice}" for choice in document.get("choices", ())]
        has_prefix = task.kind == "perplexity" or not prompt
        yield _Text(f"{task.task}, example {number}", [prompt, *choices], room, has_prefix)


def _measure(
    texts: list[_Text], tokenizer: PreTrainedTokenizerBase, rows: int, longest: int | None
) -> tuple[list[str], int]:
    """Return the positions of texts with unknown ids, and the number of texts that are too long."""
    beyond, long = [], 0
    for where, readings, room, has_prefix in texts:
        encoded: Any = tokenizer(readings)["input_ids"]
        prefix = _prefix(tokenizer) if has_prefix else 0
        highest = max([prefix, *(token for ids in encoded for token in ids)])
        if highest >= rows:
            beyond.append(f"{where} (id {highest})")
        long += longest is not None and max(map(len, encoded)) + room > longest
    return beyond, long


def _long_choices(texts: list[_Text], tokenizer: Any, longest: int | None) -> list[Problem]:
    """Find choices that the model can't read whole. lm-eval cuts only the prompt before a choice."""
    for where, (prompt, *choices), *_ in texts:
        lengths = map(len, tokenizer([prompt, *choices])["input_ids"])
        before = next(lengths)
        if longest is not None and (most := max(lengths, default=0) - before) > longest:
            return [
                Problem(
                    "a choice has more tokens than the model's maximum",
                    "eval.tasks",
                    where=where,
                    found=f"{most:,} tokens",
                    expected=f"at most {longest:,}",
                    fix="shorten the choice, or remove the example",
                    code="token-limit",
                )
            ]
    return []


def _prefix(tokenizer: Any) -> int:
    """Return the token that lm-eval puts before a text without a prompt (HFLM.prefix_token_id)."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def _of_lm_eval(
    settings: Eval, tokenizer: PreTrainedTokenizerBase, rows: int, date: str | None, with_hub: bool
) -> list[Problem]:
    """Return problems with token ids in the tasks that lm-eval reads itself.

    If every id of the tokenizer is inside the embedding, nothing is read.
    """
    theirs = [name for name in settings.tasks if (with_hub or tasks.is_file(name)) and not tasks.local(name)]
    if not theirs or max(tokenizer.get_vocab().values()) < rows:
        return []
    from finetune.evaluation import lm_eval_harness  # imports lm-eval and torch, which takes seconds

    lm_eval_settings = settings.model_copy(update={"tasks": theirs})
    texts = [_Text(*found) for found in lm_eval_harness.texts(lm_eval_settings, tokenizer, date)]
    return _unknown_ids(_measure(texts, tokenizer, rows, None)[0], "eval.tasks", rows)


def _no_token(settings: Eval) -> Problem:
    return Problem(
        "no general text has a token to predict",
        "eval.forgetting",
        found=str(settings.forgetting),
        expected="texts of two and more tokens",
        fix="eval.forgetting: true",
        code="data-empty",
    )


def _unknown_ids(beyond: list[str], key: str, rows: int) -> list[Problem]:
    if not beyond:
        return []
    return [
        Problem(
            "texts have token ids that the model does not have",
            key,
            found=listed(beyond, MOST_SHOWN),
            expected=f"ids below {rows:,}",
            code="token-limit",
            why="the tokenizer does not fit the model",
            fix="use the tokenizer of the model",
        )
    ]
