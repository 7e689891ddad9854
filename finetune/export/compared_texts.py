"""The texts on which an export is compared with the run: the validation set, or texts that finetune ships."""

from __future__ import annotations

import json
from itertools import accumulate

from transformers import PreTrainedTokenizerBase

from finetune.core import shipped_files
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.evaluation import tasks, validation_set
from finetune.export import serving_check, verify_merge
from finetune.export.export_source import Source
from finetune.export.serving_check import Texts
from finetune.recipe.schema import Recipe


def texts_of(source: Source, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Return the validation set of a run. For an adapter without a run, return texts that finetune ships."""
    if not source.has_run:
        return _shipped(recipe, tokenizer)
    held_out, _ = validation_set.held_out(source.folder, recipe, tokenizer)
    rows, _ = verify_merge.probes(recipe, tokenizer, held_out)
    examples = [row.example for row in held_out if row.example.asks][: serving_check.CHATS]
    return Texts(rows, examples, first_of([document for row in held_out for document in row.documents]))


def first_of(documents: list[Encoded]) -> list[Encoded]:
    """Return the first documents, with about as many trained tokens as the check compares losses of."""
    counts = [sum(end - start for start, end in document.trained) for document in documents]
    before = [0, *accumulate(counts)]
    return [one for one, total in zip(documents, before, strict=False) if total < serving_check.LOSS_TOKENS]


def _shipped(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Return questions and texts that finetune ships, as chats if the tokenizer has a template."""
    path = shipped_files.folder("examples") / "general" / "knowledge.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    examples = [_asked(row["question"], tokenizer) for row in rows[: serving_check.CHATS]]
    texts = tasks.general_texts(recipe.eval.model_copy(update={"forgetting": True}))[
        : verify_merge.PROBE_ROWS
    ]
    ids = [tokenizer(text)["input_ids"][: verify_merge.PROBE_TOKENS] for text in texts]
    return Texts(ids, examples, first_of([Encoded(row, [(0, len(row))]) for row in ids]))


def _asked(question: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    if not tokenizer.chat_template:
        return Example("shipped", prompt=question)
    answer = {"role": "assistant", "content": "Yes."}
    return Example("shipped", messages=[{"role": "user", "content": question}, answer], trained=(True,))
