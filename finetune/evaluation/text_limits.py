"""Hold the texts of an evaluation to the token ids and the positions of the model. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.core.errors import Problem, UserError
from finetune.data import template_sandbox
from finetune.evaluation import tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from finetune.recipe.schema import Eval

MOST_SHOWN = 3
SPECIAL, A_CHAT = 8, 256  # tokens that a tokenizer or a chat template may add to a text


def check(
    settings: Eval,
    tokenizer: PreTrainedTokenizerBase,
    rows: int,
    longest: int | None,
    date: str | None = None,
) -> list[str]:
    """Check every text on which forgetting is measured, and every text of the local tasks.

    Args:
        rows: the number of rows of the embedding.
        longest: the number of positions; `None` if the config names no limit.
        date: the date that chat templates see.

    Returns:
        Notes that count the texts that the evaluation cuts.

    Raises:
        UserError: a text has token ids that the embedding does not have (exit 2).
    """
    notes, problems = [], []
    texts = [(f"text {number}", text, 0) for number, text in enumerate(tasks.general_texts(settings), 1)]
    beyond, long = _measure(texts, tokenizer, rows, longest)
    problems += _unknown_ids(beyond, "eval.forgetting", rows)
    if long:
        notes.append(
            f"eval.forgetting: {long} of {len(texts)} texts are longer than the model's {longest} positions; "
            f"their first {longest} tokens count"
        )
    for name in filter(tasks.is_file, dict.fromkeys(settings.tasks)):
        task = tasks.read(name)
        if not task:
            continue
        asked = list(_texts(task, name, tokenizer, date))
        beyond, long = _measure(asked, tokenizer, rows, longest)
        problems += _unknown_ids(beyond, "eval.tasks", rows)
        if long and task.kind != "perplexity":  # whose texts lm-eval reads window by window
            notes.append(
                f"eval.tasks: {task.task}: {long} of {len(asked)} prompts with their answers are longer than "
                f"the model's {longest} positions; lm-eval cuts their beginning"
            )
    if problems:
        raise UserError(*problems)
    return notes


def check_metric(settings: Eval, longest_prompt: int) -> None:
    """Refuse exact match as the metric of the best model if no validation example has a prompt (exit 2)."""
    key = "eval.metric_for_best_model"
    if (
        settings.eval_steps is not None
        and settings.metric_for_best_model == "exact_match"
        and not longest_prompt
    ):
        raise UserError(Problem("no validation example asks for an answer", key, fix=f"{key}: loss"))


def longest_texts(settings: Eval) -> list[tuple[str, int]]:
    """Return each text of an evaluation with the number of further tokens, for an answer or chat markers."""
    found = [(text, SPECIAL) for text in tasks.general_texts(settings)]
    for name in filter(tasks.is_file, dict.fromkeys(settings.tasks)):
        task = tasks.read(name)
        if not task or task.kind == "perplexity":
            continue
        beside = (A_CHAT if task.chat else SPECIAL) + (
            task.max_new_tokens if task.kind in tasks.GENERATED else 0
        )
        for document in tasks.documents(task, name):
            longest = max(document.get("choices") or [""], key=len)
            found.append((f"{document['prompt']}{task.delimiter}{longest}", beside))
    return found


def _texts(
    task: tasks.Task, name: str, tokenizer: PreTrainedTokenizerBase, date: str | None
) -> Iterator[tuple[str, str, int]]:
    """The place of each text of a task, the text, and the tokens that are generated after it."""
    room = task.max_new_tokens if task.kind in tasks.GENERATED else 0
    documents = tasks.documents(task, name)
    prompts = [document["prompt"] for document in documents]
    if task.chat and tokenizer.chat_template:
        chats = [([{"role": "user", "content": prompt}], None) for prompt in prompts]
        options: Any = {**tokenizer.special_tokens_map}
        made = template_sandbox.render(
            tokenizer.get_chat_template(), options, "none", chats, prompt=True, date=date
        )
        prompts = [one.text or prompt for one, prompt in zip(made, prompts, strict=True)]
    between = "" if task.chat else task.delimiter
    for number, (prompt, document) in enumerate(zip(prompts, documents, strict=True), 1):
        where = f"{task.task}, row {number}"
        longest = max(document.get("choices") or [""], key=len)
        yield where, f"{prompt}{between}{longest}" if longest else prompt, room


def _measure(
    texts: list[tuple[str, str, int]], tokenizer: PreTrainedTokenizerBase, rows: int, longest: int | None
) -> tuple[list[str], int]:
    """The places of texts with unknown ids, and the number of texts that are longer than the model takes."""
    beyond, long = [], 0
    for where, text, room in texts:
        ids = tokenizer(text)["input_ids"]
        if ids and max(ids) >= rows:
            beyond.append(f"{where} (id {max(ids)})")
        long += longest is not None and len(ids) + room > longest
    return beyond, long


def _unknown_ids(beyond: list[str], key: str, rows: int) -> list[Problem]:
    if not beyond:
        return []
    what, more = "token ids past the model's vocabulary", len(beyond) - MOST_SHOWN
    found = ", ".join(beyond[:MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
    fix = "model.name: a model with its own tokenizer"
    return [Problem(what, key, found=found, expected=f"< {rows}", fix=fix)]
