"""mlx-lm as the program that reads an exported folder for the serving check."""

from __future__ import annotations

import importlib
import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.core import packages
from finetune.data.chat_texts import render_chat
from finetune.data.encoding import Encoded
from finetune.data.examples import Example
from finetune.data.loss_mask import IGNORED
from finetune.export import serving_check
from finetune.export.serving_check import AnswerToken, Reader

PACKAGE = "mlx_lm"


def installed() -> bool:
    """Return whether mlx-lm is installed. It also runs on CPUs of Linux (`pip install "mlx[cpu]" mlx-lm`)."""
    return packages.installed(PACKAGE)


def reader_of(model: str, revision: str | None = None, adapter: Path | None = None) -> Reader:
    """Open a model with mlx-lm. It computes in fp32, so that only the stored weights are compared.

    Args:
        model: a folder, or the name of a model on the Hub.
        adapter: the folder of an adapter in mlx-lm's layout.
    """
    mlx_lm, mx = importlib.import_module(PACKAGE), importlib.import_module("mlx.core")
    options: dict[str, Any] = {"adapter_path": str(adapter)} if adapter else {}
    opened, tokenizer = mlx_lm.load(model, revision=revision, **options)
    opened.set_dtype(mx.float32)
    return Reader(
        f"mlx-lm {importlib.metadata.version('mlx-lm')}",
        prompt_ids=lambda examples: [_prompt(tokenizer, example) for example in examples],
        answer=partial(_answer, opened, set(tokenizer.eos_token_ids)),
        stop_ids=lambda: set(tokenizer.eos_token_ids),
        losses=lambda documents: [_loss(opened, document) for document in documents],
    )


def _prompt(tokenizer: Any, example: Example) -> list[int]:
    """Return the token ids of a prompt as mlx-lm's server makes them: the template writes the BOS token."""
    if not example.messages:
        return list(tokenizer.encode(example.prompt or ""))
    text = render_chat(tokenizer, example.messages[:-1], example.tools)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _answer(model: Any, stops: set[int], prompt: list[int], room: int) -> list[AnswerToken]:
    mx, generate = importlib.import_module("mlx.core"), importlib.import_module("mlx_lm.generate")
    found = list[AnswerToken]()
    for token, scores in generate.generate_step(mx.array(prompt), model, max_tokens=room):
        found += serving_check.steps([int(token)], torch.tensor(scores.tolist())[None])
        if int(token) in stops:
            break
    return found


def _loss(model: Any, document: Encoded) -> tuple[float, float]:
    """Return the sum of the losses of a document's tokens, and their number or the sum of their weights."""
    mx = importlib.import_module("mlx.core")
    scores = torch.tensor(model(mx.array([document.ids]))[0].tolist()).log_softmax(-1)
    loss = count = 0.0
    for place, (label, weight) in enumerate(zip(document.labels(), document.token_weights(), strict=True)):
        if label != IGNORED and place and weight:
            loss, count = loss - weight * float(scores[place - 1, label]), count + weight
    return loss, count
