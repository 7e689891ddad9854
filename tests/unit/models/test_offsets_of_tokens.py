"""Offsets of tokens, by which the loss mask finds the first token of an answer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from finetune.models import tokenizer_setup
from support.paths import MODEL

PLAIN = processors.TemplateProcessing(single="$A")
ROBERTA = processors.RobertaProcessing(("<|im_end|>", 2), ("<|im_start|>", 1))


@pytest.mark.parametrize(
    "processor",
    [processors.ByteLevel(), processors.Sequence([processors.ByteLevel(), PLAIN]), ROBERTA],
    ids=["byte level", "sequence", "roberta"],
)
def test_offsets_of_a_token_include_its_spaces(processor: Any) -> None:
    """Trimmed tokens of spaces have no characters, so they would not be trained."""
    text = "Answer:    return 1"
    plain = AutoTokenizer.from_pretrained(MODEL).backend_tokenizer
    plain.post_processor = processors.ByteLevel(trim_offsets=False)
    backend = copy.deepcopy(plain)
    backend.post_processor = processor
    before = backend.encode(text)
    assert before.offsets != plain.encode(text).offsets
    tokenizer_setup.keep_spaces_in_offsets(backend)
    after = backend.encode(text)
    assert after.ids == before.ids
    found = [pair for pair, mask in zip(after.offsets, after.special_tokens_mask, strict=True) if not mask]
    assert found == plain.encode(text).offsets


def test_tokenizer_of_a_run_has_untrimmed_offsets(tmp_path: Any) -> None:
    from finetune.recipe.schema import Model

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((MODEL / "config.json").read_text())
    loaded: Any = tokenizer_setup.load_tokenizer(Model(name=str(tmp_path)))
    encoded = loaded.backend_tokenizer.encode("a:    b")
    assert [encoded.char_to_token(place) is not None for place in range(7)] == [True] * 7
