"""Weights of the loss, from a row to its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from finetune.data import loss_mask
from finetune.data.encoding import Encoded, make_encoder
from finetune.data.examples import BadRow, Example, TurnWeights
from finetune.data.formats import unused
from finetune.recipe.schema import Data
from support.chat_rows import ANSWER, USER, bad_chat, chat, read, row
from support.paths import MODEL

HALF = {"type": "text", "text": "Maria did", "weight": 0.5}
REST = {"type": "text", "text": ", I think."}
PARTS = {"role": "assistant", "content": [HALF, REST]}


def encoded(example: Example, template: str | None = None, **data: Any) -> tuple[Any, Encoded | BadRow]:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    if template:
        tokenizer.chat_template = template
    (found,) = make_encoder(tokenizer, Data(name="-", **data), chats=True)([example])
    return tokenizer, found


def weighted(example: Example, **data: Any) -> list[tuple[str, float]]:
    """The text of each trained range of tokens with one weight, and the weight."""
    tokenizer, found = encoded(example, **data)
    assert isinstance(found, Encoded)
    weights, runs = found.token_weights(), list[tuple[list[int], float]]()
    for token, label, weight in zip(found.ids, found.labels(), weights, strict=True):
        weight = weight if label != -100 else 0.0
        if not runs or runs[-1][1] != weight:
            runs.append(([], weight))
        runs[-1][0].append(token)
    return [(tokenizer.decode(ids), weight) for ids, weight in runs if weight]


@pytest.mark.parametrize("key", ["weight", "loss_weight"])
def test_a_message_has_a_weight_with_its_end_of_turn(key: str) -> None:
    found = chat(USER, {**ANSWER, key: 0.3}, USER, ANSWER)
    assert found.trained == (True, True)
    assert found.weights == (TurnWeights(0.3), TurnWeights(1.0))
    end = "<|im_end|>"
    assert weighted(found) == [(f"Maria did.{end}", 0.3), (f"Maria did.{end}", 1.0)]


def test_parts_of_a_message_have_weights_of_their_own() -> None:
    assert weighted(chat(USER, PARTS)) == [("Maria did", 0.5), (", I think.<|im_end|>", 1.0)]
    other = {**PARTS, "weight": 0.25}
    assert weighted(chat(USER, other)) == [("Maria did", 0.5), (", I think.<|im_end|>", 0.25)]
    for empty in (None, "", []):  # messages and parts of both formats in one file of parquet
        union = [{**part, "text": empty, "value": part["text"]} for part in (HALF, REST)]
        for turn in ({**PARTS, "content": union}, {**PARTS, "content": empty, "value": union}):
            assert weighted(chat(USER, turn)) == [("Maria did", 0.5), (", I think.<|im_end|>", 1.0)]
    silent = {"role": "assistant", "content": [{**HALF, "weight": 0}, REST]}
    assert weighted(chat(USER, silent)) == [(", I think.<|im_end|>", 1.0)]
    alone = {"role": "assistant", "weight": 0, "content": [HALF, REST]}
    assert weighted(chat(USER, alone)) == [("Maria did", 0.5)]


def test_a_token_with_a_leading_space_belongs_to_the_part_of_its_word() -> None:
    tokenizer = Tokenizer(models.WordLevel({"▁Maria": 0, "▁did": 1, "▁it": 2}, unk_token="▁it"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    text = "Maria did it"
    encoding = tokenizer.encode(text)
    assert encoding.offsets == [(0, 5), (5, 9), (9, 12)], "spaces are a part of their word's token"
    for spans, fractions, is_divided in (
        (((0, 6, 0.5),), [(0, 1, 0.5)], False),
        (((6, 12, 0.5),), [(1, 3, 0.5)], False),
        (((0, 7, 0.5),), [(0, 2, 0.5)], True),
        (((0, 6, 0.5), (6, 9, 0.25)), [(0, 1, 0.5), (1, 2, 0.25)], False),
    ):
        found = loss_mask.by_weight(text, encoding, (0, 3), 0, TurnWeights(1.0, spans))
        assert found == loss_mask.Weighted([(0, 3)], fractions, is_divided)
    found = loss_mask.by_weight(text, encoding, (0, 3), 0, TurnWeights(0.0, ((6, 9, 1.0),)))
    assert found == loss_mask.Weighted([(1, 2)], [], False)


def test_weights_of_0_and_1_of_whole_messages_are_no_weights() -> None:
    for flag in ({}, {"weight": 1}, {"weight": 0}, {"train": False}, {"loss_weight": 1.0}):
        found = chat(USER, {**ANSWER, **flag}, USER, ANSWER)
        assert found.weights == () and "weights" not in found.as_json()
    found = chat(USER, {**ANSWER, "weight": 0.5})
    assert Example.from_json(found.as_json()) == found


def test_a_prompts_weights_have_no_effect_and_are_named() -> None:
    value = row(prompt=[USER, {**ANSWER, "weight": 0.5}, USER], completion=[ANSWER])
    assert read(value).trained == (False, True) and read(value).weights == ()
    assert unused(value, Data(name="-"), "prompt_completion") == ["weight of a message without loss"]
    user = row(messages=[{**USER, "weight": 1}, ANSWER])
    assert unused(user, Data(name="-"), "messages") == ["weight of a message without loss"]
    assert unused(row(messages=[{**USER, "weight": 0}, ANSWER]), Data(name="-"), "messages") == []


@pytest.mark.parametrize(
    ("turns", "what"),
    [
        ([USER, {**PARTS, "content": [{**HALF, "loss_weight": 0}]}], "contradict each other"),
        (
            [{**USER, "content": None, "value": [HALF]}, ANSWER],
            "only the assistant's messages can have weights",
        ),
        ([USER, {**ANSWER, "weight": 1.5}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "weight": -0.1}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "weight": "0.5"}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "weight": float("nan")}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "weight": 10**400}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "weight": 1e-320}], "the weight of the loss has a wrong value"),
        ([USER, {**ANSWER, "train": 0.5}], "the flag to train on a message has a wrong value"),
        ([USER, {**ANSWER, "train": True, "weight": 0}], "contradict each other"),
        ([USER, {**ANSWER, "weight": 0.5, "loss_weight": 0.4}], "contradict each other"),
        ([USER, {**PARTS, "train": False}], "contradict each other"),
        ([{**USER, "weight": 0.5}, ANSWER], "only the assistant's messages can have weights"),
        ([{"role": "user", "content": [HALF]}, ANSWER], "only the assistant's messages can have weights"),
        (
            [
                USER,
                {"role": "assistant", "content": [{**HALF, "type": "reasoning"}, REST]},
            ],
            "only a part of text can have a weight",
        ),
    ],
)
def test_a_weight_that_can_not_be_meant_is_an_error(turns: list[Any], what: str) -> None:
    found = bad_chat(*turns)
    assert found.kind == "malformed" and what in found.problem.what
    assert found.problem.where.startswith("rows.jsonl:7, message ")


def test_what_excludes_weights_of_parts_is_an_error() -> None:
    thinking = {"role": "assistant", "content": [{**HALF, "text": "<think>Who?</think>Maria did"}, REST]}
    assert "`reasoning: cut` changes" in bad_chat(USER, thinking, reasoning="cut").problem.what
    _, found = encoded(chat(USER, {**ANSWER, "weight": 0.5}), train_on="all")
    assert isinstance(found, BadRow) and "excludes `train_on: all`" in found.problem.what
    upper = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' -%}"
        "{% generation %}{{ m.content + '/' + m.content + '<|im_end|>' }}{% endgeneration %}{%- else -%}"
        "{{ m.content + '<|im_end|>' }}{%- endif -%}{%- endfor -%}"
    )
    late = upper.replace("{{ m.content + '/'", "{{ '?' + m.content + '/'")
    _, found = encoded(chat(USER, PARTS), late)
    assert isinstance(found, BadRow) and "writes the content once, unchanged" in found.problem.what


def test_sharegpt_and_other_role_names_have_weights_too() -> None:
    value = row(
        conversations=[{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I.", "weight": 0.5}]
    )
    assert read(value).weights == (TurnWeights(0.5),)
