"""Rows to token ids and labels. A label is the token's own id where it carries loss, else -100.

Which tokens are the assistant's is never guessed. In this order: the chat template marks them itself
(`{% generation %}`); TRL has a marked twin of the template; or the turns are rendered one by one, each text
the beginning of the next, and what the assistant's turn added is its own. Otherwise it is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
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
Tokens = tuple[list[int], list[int]]  # ids and labels, of one length


@dataclass(frozen=True)
class Encoder:
    """One way to turn rows into tokens, for training and evaluation alike."""

    tokenizer: Any
    train_on: str  # assistant | all
    template: str | None = None  # a marked twin of the tokenizer's template
    by_turns: bool = False  # no marks: render turn by turn

    def __call__(self, row: Row) -> Tokens:
        """Token ids and labels of one row."""
        if "messages" not in row.value:
            return self._prompt_completion(row)
        turns = messages(row)
        if self.train_on == "all":
            ids = list(self._render(turns, tokenize=True, return_dict=True)["input_ids"])
            return ids, list(ids)
        if self.by_turns:
            return self._turn_by_turn(turns, row)
        output = self._render(turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, marked = list(output["input_ids"]), output["assistant_masks"]
        return ids, [i if mark else IGNORED for i, mark in zip(ids, marked, strict=True)]

    def prompt(self, row: Row) -> list[int]:
        """Token ids of everything before the answer, ending where the model is to go on."""
        given, _ = prompt_and_answer(row)
        if isinstance(given, str):
            return self.tokenizer(given)["input_ids"]
        return list(
            self._render(given, tokenize=True, return_dict=True, add_generation_prompt=True)["input_ids"]
        )

    def _prompt_completion(self, row: Row) -> Tokens:
        prompt, completion = (_text(row, key) for key in ("prompt", "completion"))
        prefix = self.tokenizer(prompt)["input_ids"]
        answer = self.tokenizer(completion, add_special_tokens=False)["input_ids"]
        ids = [*prefix, *answer, self.tokenizer.eos_token_id]
        untrained = 0 if self.train_on == "all" else len(prefix)
        return ids, [IGNORED] * untrained + ids[untrained:]

    def _turn_by_turn(self, turns: list[dict[str, Any]], row: Row) -> Tokens:
        """What an assistant's turn adds to the text so far is the assistant's, and so are its tokens."""
        text = self._render(turns, tokenize=False)
        spans = []
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = self._render(turns[:index], tokenize=False, add_generation_prompt=True)
                after = self._render(turns[: index + 1], tokenize=False)
                if not (after.startswith(before) and text.startswith(after)):
                    what = "the chat template neither marks the assistant's tokens nor renders turn by turn"
                    fix = "chat_template: <a Jinja file with {% generation %} marks>, or train_on: all"
                    raise UserError(Problem(what, "data.chat_template", row.where, fix=fix))
                spans.append((len(before), len(after)))
        # The template wrote the special tokens; adding them again would double the first one
        output = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = output["input_ids"]
        mine = [any(low <= start < high for low, high in spans) for start, _ in output["offset_mapping"]]
        return ids, [i if own else IGNORED for i, own in zip(ids, mine, strict=True)]

    def _render(self, turns: list[dict[str, Any]], **options: Any) -> Any:
        return self.tokenizer.apply_chat_template(turns, chat_template=self.template, **options)


def make_encoder(tokenizer: PreTrainedTokenizerBase, data: Data, format: str) -> Encoder:
    """The exact way to find the assistant's tokens with this tokenizer (exit 2 if it has no template)."""
    if format == "messages" and not tokenizer.chat_template:
        fix = "chat_template: <a Jinja file>"
        raise UserError(Problem("the tokenizer has no chat template", "data.chat_template", fix=fix))
    if format != "messages" or data.train_on == "all":
        return Encoder(tokenizer, data.train_on)
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if has_generation_markers(tokenizer.chat_template):
        return Encoder(tokenizer, data.train_on)
    try:
        return Encoder(tokenizer, data.train_on, template=get_training_chat_template(tokenizer))
    except ValueError:  # not one of the templates TRL knows
        return Encoder(tokenizer, data.train_on, by_turns=True)


def load_splits(
    data: Data, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Dataset, dict[str, Split]]:
    """Training rows as `input_ids` and `labels`, and a report of them and of the held-out rows.

    Raises:
        UserError: rows that are not chats, no exact mask, or no row left to train on (exit 2).
    """
    from datasets import Dataset

    train_rows, held_out, hashes = load.read(data, seed)
    report = {"train": Split(sources=hashes), "validation": Split()}
    encoded = encode(train_rows, data, tokenizer, report["train"])
    encode(held_out, data, tokenizer, report["validation"])
    if not encoded:
        split = report["train"]
        what = f"0 of {split.rows} rows keep a trained token"
        found = (
            f"{split.too_long} longer than {data.max_length}, {split.nothing_trained} with nothing to train"
        )
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
    encoder, stops = make_encoder(tokenizer, data, split.format), stop_ids(tokenizer)
    encoded = []
    for row in rows:
        ids, labels = encoder(row)
        split.longest = max(split.longest, len(ids))
        if len(ids) > data.max_length and data.too_long == "error":
            expected = f"at most {data.max_length}, or too_long: drop"
            raise UserError(
                Problem("a row is too long", "data.max_length", row.where, f"{len(ids)}", expected)
            )
        trained = [label for label in labels[1:] if label != IGNORED]  # the first token is never predicted
        if len(ids) > data.max_length:
            split.too_long += 1
        elif not trained:
            split.nothing_trained += 1
        else:
            split.kept += 1
            split.tokens += len(ids)
            split.trained_tokens += len(trained)
            split.ends_trained += any(label in stops for label in trained[-2:])  # "\n" may follow the stop
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
    raise UserError(Problem("no columns to train on", where=row.where, found=found, expected=expected))


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
        where = f"{row.where}, message {number}"
        if role not in ROLES:
            expected = ", ".join(ROLES)
            problems.append(Problem("no such role", where=where, found=str(role), expected=expected))
        elif not isinstance(turn.get("content"), str):
            problems.append(Problem("content must be text", where=where, found=str(turn.get("content"))[:60]))
    if not problems and turns[-1]["role"] != "assistant":
        found = ", ".join(turn["role"] for turn in turns)
        problems.append(Problem("the last message must be the assistant's", where=row.where, found=found))
    if problems:
        raise UserError(*problems[:MAX_SHOWN])
    return turns


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Ids that end a turn: the tokenizer's eos and the usual end-of-turn tokens it knows."""
    vocabulary, eos = tokenizer.get_vocab(), tokenizer.eos_token_id
    usual = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eot|>", "</s>")
    ids = {vocabulary[token] for token in usual if token in vocabulary}
    return ids | ({eos} if isinstance(eos, int) else set())


def _text(row: Row, key: str) -> str:
    value = row.value.get(key)
    if not isinstance(value, str):
        raise UserError(Problem(f"{key} must be text", where=row.where, found=str(value)[:60]))
    return value
