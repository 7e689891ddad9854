"""Golden ids and masks of six families' chat formats, each written by hand from the family's own documents.

A chat is a list of (text, trained) pieces. Trained is what the model has to say after the generation prompt,
to the end of its turn. FINETUNE_REWRITE_GOLDEN=1 pytest and this file's path write the file again.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from finetune.core.errors import UserError
from finetune.data import chat_templates, encoding
from finetune.data.examples import Row
from finetune.data.formats import convert
from finetune.models.tokenizer_setup import load_tokenizer
from finetune.recipe.schema import Data, Model
from support.paths import MODEL, ROOT

GOLDEN = ROOT / "tests" / "golden" / "templates.json"


@dataclass(frozen=True)
class Family:
    """A tokenizer's special tokens, as its own tokenizer_config.json has them."""

    eos: str
    bos: str = ""
    pad: str = ""
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()  # added, and not special


LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
MISTRAL = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
MISTRAL += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
QWEN3 = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "llama3": Family("<|eot_id|>", "<|begin_of_text|>", special=LLAMA3),
    "qwen3": Family("<|im_end|>", pad="<|endoftext|>", plain=QWEN3),
    "mistral": Family("</s>", "<s>", special=MISTRAL),
    "gemma": Family("<eos>", "<bos>", "<pad>", ("<start_of_turn>", "<end_of_turn>")),
    "phi3": Family(
        "<|endoftext|>", "<s>", "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    ),
    "chatml": Family("<|im_end|>", pad="<|endoftext|>"),
}


@dataclass(frozen=True)
class Case:
    name: str
    family: str
    messages: list[dict[str, Any]]
    pieces: list[tuple[str, bool]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    reasoning: Any = "keep"

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)

    @property
    def data(self) -> Data:
        return Data(name="-", reasoning=self.reasoning)

    @property
    def example(self) -> Any:
        return convert(Row({"messages": self.messages, "tools": self.tools}, "a:1"), self.data, "messages")


def said(*turns: str, system: str = "") -> list[dict[str, Any]]:
    """The user and the assistant in turn."""
    roles = ("user", "assistant") * len(turns)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]


TURNS = ("Who came?", "Maria did.", "And who left?", "Omar.")
CHAT, BRIEF = said(*TURNS), said(*TURNS, system="Be brief.")
WEATHER_JSON = (
    '{"type": "function", "function": {"name": "weather", "description": "The weather now", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}'
)
WEATHER = json.loads(WEATHER_JSON)
CALLED = [
    {"role": "user", "content": "How warm is Rome?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call12345", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}],
    },
    {"role": "tool", "content": '{"celsius": 22}', "tool_call_id": "call12345"},
    {"role": "assistant", "content": "It is 22 degrees."},
]
QWEN_TOOLS = (
    "<|im_start|>system\n{system}# Tools\n\nYou may call one or more functions to assist with the user query."
    "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n"
    "</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call><|im_end|>\n'
)
LLAMA = "<|start_header_id|>{}<|end_header_id|>\n\n"
L_USER, L_ASSISTANT = LLAMA.format("user"), LLAMA.format("assistant")
ML_USER, ML_ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"  # what Qwen 3 says first when it does not think
CASES = [
    Case(
        "llama3",
        "llama3",
        CHAT,
        [
            (f"<|begin_of_text|>{L_USER}Who came?<|eot_id|>{L_ASSISTANT}", False),
            ("Maria did.<|eot_id|>", True),
            (f"{L_USER}And who left?<|eot_id|>{L_ASSISTANT}", False),
            ("Omar.<|eot_id|>", True),
        ],
    ),
    Case(
        "llama3, system message, blanks round contents",
        "llama3",
        said(" Who came? ", "\nMaria did.\n\n", system="Be brief."),
        [
            (f"<|begin_of_text|>{LLAMA.format('system')}Be brief.<|eot_id|>", False),
            (f"{L_USER}Who came?<|eot_id|>{L_ASSISTANT}", False),
            ("Maria did.<|eot_id|>", True),
        ],
    ),
    Case(
        "qwen3, system message",
        "qwen3",
        BRIEF,
        [
            ("<|im_start|>system\nBe brief.<|im_end|>\n", False),
            (f"{ML_USER}Who came?<|im_end|>\n{ML_ASSISTANT}", False),
            (f"{EMPTY}Maria did.<|im_end|>", True),
            (f"\n{ML_USER}And who left?<|im_end|>\n{ML_ASSISTANT}", False),
            (f"{EMPTY}Omar.<|im_end|>", True),
            ("\n", False),
        ],
    ),
    Case(
        "qwen3, reasoning kept, in the content and beside it",
        "qwen3",
        [
            *said("Who came?", "<think>\nTwo names.\n</think>\n\nMaria did."),
            {"role": "user", "content": "And who left?"},
            {"role": "assistant", "content": "Omar.", "reasoning_content": "One left."},
        ],
        [
            (f"{ML_USER}Who came?<|im_end|>\n{ML_ASSISTANT}", False),
            ("<think>\nTwo names.\n</think>\n\nMaria did.<|im_end|>", True),
            (f"\n{ML_USER}And who left?<|im_end|>\n{ML_ASSISTANT}", False),
            ("<think>\nOne left.\n</think>\n\nOmar.<|im_end|>", True),
            ("\n", False),
        ],
    ),
    Case(
        "qwen3, reasoning cut",
        "qwen3",
        said("Who came?", "<think>\nTwo names.\n</think>\n\nMaria did."),
        [
            (f"{ML_USER}Who came?<|im_end|>\n{ML_ASSISTANT}", False),
            (f"{EMPTY}Maria did.<|im_end|>", True),
            ("\n", False),
        ],
        reasoning="cut",
    ),
    Case(
        "qwen3, tools",
        "qwen3",
        CALLED,
        [
            (QWEN_TOOLS.format(tools=WEATHER_JSON, system=""), False),
            (f"{ML_USER}How warm is Rome?<|im_end|>\n{ML_ASSISTANT}", False),
            (f'{EMPTY}<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n', True),
            ("</tool_call><|im_end|>", True),
            (f'\n{ML_USER}<tool_response>\n{{"celsius": 22}}\n</tool_response><|im_end|>\n', False),
            (ML_ASSISTANT, False),
            (f"{EMPTY}It is 22 degrees.<|im_end|>", True),
            ("\n", False),
        ],
        [WEATHER],
    ),
    Case(
        "qwen3, tools, system message, two calls and results at once",
        "qwen3",
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rome and Oslo?"},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [{"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo")],
            },
            {"role": "tool", "content": "22"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "22 and 3."},
        ],
        [
            (QWEN_TOOLS.format(tools=WEATHER_JSON, system="Be brief.\n\n"), False),
            (f"{ML_USER}Rome and Oslo?<|im_end|>\n{ML_ASSISTANT}", False),
            (f'{EMPTY}I look.\n<tool_call>\n{{"name": "weather", "arguments": {{"city": "Rome"}}}}\n', True),
            ('</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n', True),
            ("</tool_call><|im_end|>", True),
            (f"\n{ML_USER}<tool_response>\n22\n</tool_response>\n", False),
            (f"<tool_response>\n3\n</tool_response><|im_end|>\n{ML_ASSISTANT}", False),
            (f"{EMPTY}22 and 3.<|im_end|>", True),
            ("\n", False),
        ],
        [WEATHER],
    ),
    Case(
        "mistral, system message",
        "mistral",
        BRIEF,
        [
            ("<s>[INST] Be brief.\n\nWho came?[/INST]", False),
            (" Maria did.</s>", True),
            ("[INST] And who left?[/INST]", False),
            (" Omar.</s>", True),
        ],
    ),
    Case(
        "mistral, tools",
        "mistral",
        CALLED,
        [
            (f"<s>[AVAILABLE_TOOLS] [{WEATHER_JSON}][/AVAILABLE_TOOLS]", False),
            ("[INST] How warm is Rome?[/INST]", False),
            ('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, ', True),
            ('"id": "call12345"}]</s>', True),
            ('[TOOL_RESULTS] {"content": {"celsius": 22}, "call_id": "call12345"}[/TOOL_RESULTS]', False),
            (" It is 22 degrees.</s>", True),
        ],
        [WEATHER],
    ),
    Case(
        "gemma",
        "gemma",
        CHAT,
        [
            ("<bos><start_of_turn>user\nWho came?<end_of_turn>\n<start_of_turn>model\n", False),
            ("Maria did.<end_of_turn>", True),
            ("\n<start_of_turn>user\nAnd who left?<end_of_turn>\n<start_of_turn>model\n", False),
            ("Omar.<end_of_turn>", True),
            ("\n", False),
        ],
    ),
    Case(
        "phi3, system message",
        "phi3",
        BRIEF,
        [
            ("<|system|>\nBe brief.<|end|>\n<|user|>\nWho came?<|end|>\n<|assistant|>\n", False),
            ("Maria did.<|end|>", True),
            ("\n<|user|>\nAnd who left?<|end|>\n<|assistant|>\n", False),
            ("Omar.<|end|>", True),
            ("\n<|endoftext|>", False),
        ],
    ),
    Case(
        "chatml, system message",
        "chatml",
        BRIEF,
        [
            (f"<|im_start|>system\nBe brief.<|im_end|>\n{ML_USER}Who came?<|im_end|>\n{ML_ASSISTANT}", False),
            ("Maria did.<|im_end|>", True),
            (f"\n{ML_USER}And who left?<|im_end|>\n{ML_ASSISTANT}", False),
            ("Omar.<|im_end|>", True),
            ("\n", False),
        ],
    ),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def tokenizer_of(family: str, pad: str = "") -> Any:
    """The embedded tokenizer with a family's special tokens; it adds the BOS by itself, as theirs do."""
    from tokenizers.processors import TemplateProcessing

    has = FAMILIES[family]
    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)), chat_templates.read_template(family))
    tokenizer.add_tokens([t for t in (has.eos, has.bos, has.pad, *has.special) if t], special_tokens=True)
    tokenizer.add_tokens(list(has.plain))
    named = {"eos_token": has.eos, "pad_token": pad or has.pad or has.eos}
    tokenizer.add_special_tokens(named | ({"bos_token": has.bos} if has.bos else {}))
    if has.bos:
        bos = [(has.bos, tokenizer.bos_token_id)]
        single = f"{has.bos} $A"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=bos)
    return tokenizer


family_tokenizer = cache(tokenizer_of)


def encode(case: Case, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and labels, after looking at the text."""
    encoder = encoding.make_encoder(tokenizer, case.data, chats=True)
    (rendered,) = encoder.render([case.example])
    assert rendered and rendered.text == case.text
    (encoded,) = encoder([case.example])
    assert isinstance(encoded, encoding.Encoded), encoded
    return encoded.ids, encoded.labels()


def expected(case: Case, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids of the whole text, and for each the label that its piece asks for."""
    found = tokenizer(case.text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [sum(len(text) for text, _ in case.pieces[: n + 1]) for n in range(len(case.pieces))]
    labels = []
    for token, (start, end) in zip(found["input_ids"], found["offset_mapping"], strict=True):
        piece = next(n for n, stop in enumerate(ends) if start < stop)
        assert end <= ends[piece], "no token of these chats reaches over a border"
        labels.append(token if case.pieces[piece][1] else -100)
    return found["input_ids"], labels


@by_case
def test_ids_and_masks_are_those_written_by_hand(case: Case) -> None:
    tokenizer = family_tokenizer(case.family)
    assert encode(case, tokenizer) == expected(case, tokenizer)


@by_case
def test_the_mask_is_the_same_when_the_padding_token_is_the_end_of_turn(case: Case) -> None:
    end = re.findall(r"<[^<>\s]+>", "".join(text for text, trained in case.pieces if trained))[-1]
    ids, labels = encode(case, tokenizer_of(case.family, pad=end))
    plain_ids, plain_labels = encode(case, family_tokenizer(case.family))
    assert labels == plain_labels and ids == plain_ids
    assert family_tokenizer(case.family).convert_tokens_to_ids(end) in labels


@by_case
def test_marks_and_turn_by_turn_give_the_same_mask(case: Case) -> None:
    """The tags are replaced with ones that do nothing, so that the template writes what it wrote."""
    tokenizer = tokenizer_of(case.family)
    template = tokenizer.chat_template
    marked = template if encoding.MARKS.search(template) else chat_templates.marked_twin(template)
    assert marked, "each of the six has marks, or a twin that has"
    tokenizer.chat_template = marked
    assert encoding.make_encoder(tokenizer, case.data, chats=True).way == "marks"
    by_marks = encode(case, tokenizer)
    bare = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", marked)
    bare = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", bare)
    tokenizer.chat_template = bare
    assert encoding.make_encoder(tokenizer, case.data, chats=True).way == "turns"
    assert encode(case, tokenizer) == by_marks == encode(case, family_tokenizer(case.family))


def test_the_stock_templates_are_trained_by_their_marked_twins() -> None:
    for family in ("llama3", "qwen3", "gemma", "phi3"):
        tokenizer = family_tokenizer(family)
        encoder = encoding.make_encoder(tokenizer, Data(name="-"), chats=True)
        assert not encoding.MARKS.search(tokenizer.chat_template), "the one that is saved is the family's own"
        assert encoder.way == "marks" and encoder.template != tokenizer.chat_template


def test_ids_and_masks_have_not_changed() -> None:
    """A change of any of these chats shows as a difference in one small file."""
    found = {}
    for case in CASES:
        ids, labels = encode(case, family_tokenizer(case.family))
        found[case.name] = {"ids": ids, "mask": "".join("-x"[label != -100] for label in labels)}
    if os.environ.get("FINETUNE_REWRITE_GOLDEN"):
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert json.loads(GOLDEN.read_text()) == found


# Qwen 3's own template leaves earlier reasoning out of prompts; its twin trains on it
@pytest.mark.parametrize("case", [c for c in CASES if c.family != "qwen3"], ids=lambda case: case.name)
def test_the_prompt_at_inference_is_what_stands_before_the_last_answer(case: Case) -> None:
    tokenizer = family_tokenizer(case.family)
    encoder = encoding.make_encoder(tokenizer, case.data, chats=True)
    (prompt,) = encoder.prompts([case.example])
    ids, labels = encode(case, tokenizer)
    assert ids[: len(prompt)] == prompt
    assert labels[len(prompt) - 1] == -100 and labels[len(prompt)] == ids[len(prompt)]


def test_loss_begins_where_the_prompt_ends_with_every_bundled_template() -> None:
    """But with one whose twin does not begin as the prompt does, which is noted, and those for images."""
    thinks = [{"content": "<think>\nqz\n</think>\n\nOmar."}, {"content": "Omar.", "reasoning_content": "qz"}]
    begun, other, refused = set(), set(), set()
    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)))
    words = set(
        re.findall(r"<\W\w[^<>'\"\s]*\W>", "".join(chat_templates.bundled().values()))
    )  # <|end|> and the like
    tokenizer.add_tokens(sorted(words - {*tokenizer.get_vocab()}), special_tokens=True)
    tokenizer.bos_token = "<|endoftext|>"
    for name, template in chat_templates.bundled().items():
        tokenizer.chat_template = template
        try:
            encoder = encoding.make_encoder(tokenizer, Data(name="-"), chats=True)
        except UserError:
            refused.add(name)
            continue
        for answer in ({"content": "Omar."}, *thinks):
            turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", **answer}]
            example = convert(Row({"messages": turns}, "a:1"), Data(name="-"), "messages")
            (encoded,), (prompt,) = encoder([example]), encoder.prompts([example])
            if isinstance(encoded, encoding.Encoded) and encoded.ids[: len(prompt)] == prompt:
                assert [start for start, _ in encoded.trained] == [len(prompt)], name
                begun.add(name)
        if name not in begun:
            assert "writes the prompt of the first answer differently at inference" in encoder.notes[0]
            other.add(name)
    assert refused == {"idefics3", "llava_next", "smolvlm"} and other == {"deepseekv3"}
