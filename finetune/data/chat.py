"""Rows to token ids and labels. A label is the token's own id where it carries loss, else -100.

The assistant's tokens are those the chat template marks with `{% generation %}`: exact, and the template's own
word on where a turn ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.data import load
from finetune.data.load import MAX_SHOWN, Row, Split
from finetune.errors import Problem, UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from finetune.recipe import Data

IGNORED = -100
ROLES = ("system", "user", "assistant", "tool")


def load_splits(
    data: Data, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Dataset, dict[str, Split]]:
    """Training rows as `input_ids` and `labels`, and a report of them and of the held-out rows.

    Raises:
        UserError: rows that are not chats, a template without marks, or no row left to train on (exit 2).
    """
    from datasets import Dataset

    train_rows, held_out, hashes = load.read(data, seed)
    report = {"train": Split(sources=hashes), "validation": Split()}
    encoded = encode(train_rows, data, tokenizer, report["train"])
    encode(held_out, data, tokenizer, report["validation"])
    if not encoded:
        split = report["train"]
        what = f"0 of {split.rows} rows keep a trained token"
        found = f"{split.too_long} longer than {data.max_length}, {split.nothing_trained} with nothing to train on"
        fix = f"raise data.max_length (the longest row has {split.longest} tokens)"
        raise UserError(Problem(what, "data.max_length", found=found, fix=fix))
    return Dataset.from_list(encoded), report


def encode(
    rows: list[Row], data: Data, tokenizer: PreTrainedTokenizerBase, split: Split
) -> list[dict[str, list[int]]]:
    """Token ids and labels of each row that is kept; `split` counts what became of the others."""
    if not rows:
        return []
    split.rows, split.format = len(rows), detect_format(rows[0])
    if split.format == "messages":
        check_template(tokenizer, data)
    encoded = []
    stops = stop_ids(tokenizer)
    for row in rows:
        ids, labels = tokens(row, data, tokenizer, split.format)
        split.longest = max(split.longest, len(ids))
        if len(ids) > data.max_length:
            if data.too_long == "error":
                found = f"{len(ids)} tokens"
                raise UserError(Problem("a row is too long", "data.max_length", row.where, found, str(data.max_length)))
            split.too_long += 1
            continue
        trained = [label for label in labels[1:] if label != IGNORED]  # the first token is never predicted
        if not trained:
            split.nothing_trained += 1
            continue
        split.kept += 1
        split.tokens += len(ids)
        split.trained_tokens += len(trained)
        split.ends_trained += any(label in stops for label in trained[-2:])  # "\n" may follow the stop token
        encoded.append({"input_ids": ids, "labels": labels})
    return encoded


def detect_format(row: Row) -> str:
    """`messages` or `prompt_completion`, by the columns of the first row."""
    if "messages" in row.value:
        return "messages"
    if {"prompt", "completion"} <= row.value.keys():
        return "prompt_completion"
    found = ", ".join(map(str, row.value))
    expected = "messages (a list of role and content), or prompt and completion"
    raise UserError(Problem("no columns to train on", "data.name", row.where, found, expected))


def tokens(
    row: Row, data: Data, tokenizer: PreTrainedTokenizerBase, format: str
) -> tuple[list[int], list[int]]:
    """Token ids and labels of one row, both of the row's length."""
    if format == "prompt_completion":
        prompt, completion = (_text(row, key) for key in ("prompt", "completion"))
        prefix = tokenizer(prompt)["input_ids"]
        answer = tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids = [*prefix, *answer, tokenizer.eos_token_id]
        trained = len(ids) if data.train_on == "all" else len(answer) + 1
        return ids, [IGNORED] * (len(ids) - trained) + ids[-trained:]
    output: Any = tokenizer.apply_chat_template(
        messages(row), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = list(output["input_ids"])
    if data.train_on == "all":
        return ids, list(ids)
    marked = output["assistant_masks"]
    return ids, [i if mark else IGNORED for i, mark in zip(ids, marked, strict=True)]


def prompt_and_answer(row: Row) -> tuple[list[dict[str, Any]] | str, str]:
    """What the model is given and what it should say: all before the last turn, and the last turn."""
    if "messages" in row.value:
        turns = messages(row)
        return turns[:-1], turns[-1]["content"]
    return _text(row, "prompt"), _text(row, "completion")


def messages(row: Row) -> list[dict[str, Any]]:
    """The row's messages, checked: known roles, text contents, an assistant's answer at the end."""
    turns = row.value.get("messages")
    if not isinstance(turns, list) or not turns:
        raise UserError(Problem("messages must be a list", where=row.where, found=str(turns)[:60]))
    problems = []
    for number, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, dict) else None
        if role not in ROLES:
            where, expected = f"{row.where}, message {number}", ", ".join(ROLES)
            problems.append(Problem("no such role", where=where, found=str(role), expected=expected))
        elif not isinstance(turn.get("content"), str):
            where, found = f"{row.where}, message {number}", str(turn.get("content"))[:60]
            problems.append(Problem("content must be text", where=where, found=found))
    if not problems and turns[-1]["role"] != "assistant":
        found = ", ".join(turn["role"] for turn in turns)
        problems.append(Problem("the last message must be the assistant's", where=row.where, found=found))
    if problems:
        raise UserError(*problems[:MAX_SHOWN])
    return turns


def check_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Loss on the assistant needs a template that says which tokens are the assistant's (exit 2)."""
    template = tokenizer.chat_template
    if not template:
        fix = "chat_template: <a Jinja file>"
        raise UserError(Problem("the tokenizer has no chat template", "data.chat_template", fix=fix))
    if data.train_on == "assistant" and "{% generation" not in str(template).replace("{%-", "{%"):
        what = "the chat template does not mark the assistant's tokens ({% generation %})"
        fix = "chat_template: <a Jinja file with the marks>, or train_on: all"
        raise UserError(Problem(what, "data.chat_template", fix=fix))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end a turn: the tokenizer's eos and the usual end-of-turn tokens it knows."""
    vocabulary = tokenizer.get_vocab()
    usual = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "</s>")
    ids = {vocabulary[token] for token in usual if token in vocabulary}
    return ids | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set())


def _text(row: Row, key: str) -> str:
    value = row.value.get(key)
    if not isinstance(value, str):
        raise UserError(Problem(f"{key} must be text", where=row.where, found=str(value)[:60]))
    return value
