"""Tokenizers with a chat template, and their encoders."""

from __future__ import annotations

from typing import Any

from finetune.data import encoding
from finetune.data.examples import Example, Row
from finetune.data.formats import convert
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Model
from support.paths import MODEL

TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Maria did."},
    {"role": "user", "content": "And who left?"},
    {"role": "assistant", "content": "Omar."},
]


def tokenizer_with(template: str | None = None, bos: bool = False) -> Any:
    """The example tokenizer. With `bos`, it begins every text with <s>."""
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)), template)
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        begin = [("<s>", tokenizer.bos_token_id)]
        processor = TemplateProcessing(single="<s> $A", special_tokens=begin)
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def encoder_of(tokenizer: Any, chats: bool = True, **data: Any) -> encoding.Encoder:
    return encoding.make_encoder(tokenizer, Data(name="-", **data), chats)


def example(messages: list[dict[str, Any]]) -> Example:
    return convert(Row({"messages": messages}, "a:1"), Data(name="-"), "messages")
