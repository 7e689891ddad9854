"""Which tokens carry loss, whatever a template or a text does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.core.errors import UserError
from finetune.data import chat_templates, encoding
from finetune.data.examples import BadRow, Example, Row
from finetune.data.formats import convert
from finetune.data.preparation import prepare
from finetune.models.tokenizer_setup import declared_ends, foreign_template, load_tokenizer
from finetune.recipe.schema import Data, Model
from support.chat_tokenizers import TURNS, encoder_of, example, tokenizer_with
from support.paths import ASSETS, DATA


def one(encoder: encoding.Encoder, found: Example) -> encoding.Encoded:
    (encoded,) = encoder([found])
    assert isinstance(encoded, encoding.Encoded), encoded
    assert len(encoded.labels()) == len(encoded.ids)
    return encoded


def trained(encoder: encoding.Encoder, messages: list[dict[str, Any]]) -> str:
    labels = one(encoder, example(messages)).labels()
    return encoder.tokenizer.decode([label for label in labels if label != -100])


def refused(template: str, messages: list[dict[str, Any]]) -> BadRow:
    encoder = encoder_of(tokenizer_with(template))
    (bad,) = encoder([example(messages)])
    assert isinstance(bad, BadRow) and bad.problem.where == "a:1"
    return bad


def test_train_on_says_which_turns() -> None:
    tokenizer = tokenizer_with()
    call = {"function": {"name": "look", "arguments": {}}}
    template = chat_templates.read_template("qwen3")
    tools = [*TURNS[:3], {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    tools += [{"role": "tool", "content": "Omar"}, {"role": "assistant", "content": "Omar."}]
    first, last = "Maria did.<|im_end|>", "Omar.<|im_end|>"
    assert trained(encoder_of(tokenizer), TURNS) == first + last
    assert trained(encoder_of(tokenizer, train_on="last_turn"), TURNS) == last
    assert trained(encoder_of(tokenizer, train_on="completion"), TURNS) == last
    everything = one(encoder_of(tokenizer, train_on="all"), example(TURNS))
    assert everything.labels() == everything.ids
    completion = trained(encoder_of(tokenizer_with(template), train_on="completion"), tools)
    assert "I look." in completion and "Omar." in completion and "Maria" not in completion
    assert "I look." not in trained(encoder_of(tokenizer_with(template), train_on="last_turn"), tools)


def test_a_message_says_for_itself_whether_it_is_trained_on() -> None:
    encoder = encoder_of(tokenizer_with())
    for flag in ({"train": False}, {"weight": 0}, {"loss_weight": 0.0}):
        messages = [TURNS[0], {**TURNS[1], **flag}, *TURNS[2:]]
        assert trained(encoder, messages) == "Omar.<|im_end|>"
        assert trained(encoder_of(tokenizer_with(), train_on="last_turn"), messages) == "Omar.<|im_end|>"
    for flag in ({"train": True}, {"weight": 1}, {"train": None}):
        assert trained(encoder, [TURNS[0], {**TURNS[1], **flag}]) == "Maria did.<|im_end|>"


def test_a_text_that_a_template_made_is_given_no_second_bos() -> None:
    template = "{{ bos_token }}" + chat_templates.read_template("chatml")
    encoder = encoder_of(tokenizer_with(template, bos=True))
    encoded = one(encoder, example(TURNS))
    bos = encoder.tokenizer.bos_token_id
    assert encoded.ids[0] == bos and encoded.ids.count(bos) == 1 and not encoded.doubled


@pytest.mark.parametrize("beginning", ["", "<s>"])
def test_a_text_has_one_bos_whether_it_brings_its_own_or_not(beginning: str) -> None:
    encoder = encoder_of(tokenizer_with(bos=True), chats=False)
    bos, plain = encoder.tokenizer.bos_token_id, Example("a:1", completion=f"{beginning}Who came?")
    asked = Example("a:1", prompt=f"{beginning}Who came?", completion=" Maria.")
    for found in (plain, asked):
        encoded = one(encoder, found)
        assert encoded.ids[0] == bos and encoded.ids.count(bos) == 1
        assert encoded.doubled == bool(beginning)
    (prompt,) = encoder.prompts([asked])
    assert one(encoder, asked).ids[: len(prompt)] == prompt


def test_a_tokenizer_that_ends_texts_does_not_end_prompts() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizer_with()
    end = [("<|im_end|>", tokenizer.eos_token_id)]
    processor = TemplateProcessing(single="$A <|im_end|>", special_tokens=end)
    tokenizer.backend_tokenizer.post_processor = processor
    encoder = encoder_of(tokenizer, chats=False)
    asked = Example("a:1", prompt="Who came?", completion=" Maria.")
    assert one(encoder, asked).ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.eos_token_id not in encoder.prompts([asked])[0]


def test_a_template_that_adds_to_every_text_is_caught() -> None:
    config = ASSETS / "tokenizer-qwen2" / "tokenizer_config.json"
    if not config.exists():
        pytest.skip("no shared assets (FINETUNE_TEST_ASSETS)")
    template = json.loads(config.read_text())["chat_template"]
    assert template.endswith("template ends here")
    for messages in (TURNS, TURNS[:2]):
        assert "neither marks" in refused(template, messages).problem.found


def test_what_a_template_adds_to_the_last_turn_only_is_not_trained() -> None:
    stock = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    stock += "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}the end{% endif %}"
    encoder = encoder_of(tokenizer_with(stock))
    assert encoder.way == "turns"
    assert trained(encoder, TURNS) == "Maria did.<|im_end|>Omar.<|im_end|>"
    assert trained(encoder, TURNS[:2]) == "Maria did.<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    template = "{{ messages | length }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert "renders turn by turn" in refused(template, TURNS).problem.found
    drops = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' or loop.last %}"
    drops += "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    drops += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert "renders turn by turn" in refused(drops, TURNS).problem.found
    assert trained(encoder_of(tokenizer_with(drops)), TURNS[:2]) == "Maria did.<|im_end|>"


@pytest.mark.parametrize(
    ("family", "turn", "says"),
    [
        ("gemma", {"role": "system", "content": "Be brief."}, "System role not supported"),
        ("chatml", {"tool_calls": [{"name": "look"}]}, "ignores tool calls"),
        ("phi3", {"role": "tool", "content": "Omar"}, "ignores tool results"),
        ("qwen2_5", {"reasoning": "Two names."}, "ignores reasoning"),
    ],
)
def test_what_a_template_has_no_place_for_is_an_error_of_the_row(family: str, turn: Any, says: str) -> None:
    messages = [TURNS[0], {**TURNS[1], **turn}]
    if turn.get("role") == "system":
        messages = [turn, *TURNS]
    elif turn.get("role") == "tool":
        messages = [*TURNS[:2], turn, TURNS[3]]
    bad = refused(chat_templates.read_template(family), messages)
    assert says in bad.problem.what + bad.problem.found and bad.kind == "malformed"


def test_an_answer_that_ends_in_an_emoji_of_several_tokens_is_trained_whole() -> None:
    tokenizer = tokenizer_with()
    assert len(tokenizer("🦙", add_special_tokens=False)["input_ids"]) > 1
    marks_content_only = chat_templates.read_template("chatml").replace(
        "message['content'] + '<|im_end|>' -}}{%- endgeneration -%}",
        "message['content'] -}}{%- endgeneration -%}{{- '<|im_end|>' -}}",
    )
    messages = [TURNS[0], {"role": "assistant", "content": "A 🦙"}]
    assert trained(encoder_of(tokenizer), messages) == "A 🦙<|im_end|>"
    assert trained(encoder_of(tokenizer_with(marks_content_only)), messages) == "A 🦙"
    begins = [TURNS[0], {"role": "assistant", "content": "🦙 A"}]
    assert trained(encoder_of(tokenizer), begins) == "🦙 A<|im_end|>"


@pytest.mark.parametrize(
    ("before", "content", "after", "merged"),
    [("Answer: ", "Maria", "!", False), ("Answer: Mar", "ia", "!", True), ("Answer: ", "Mar", "ia", True)],
)
def test_a_border_inside_of_a_token_is_counted(before: str, content: str, after: str, merged: bool) -> None:
    """`Maria` is one token. At inference, where the prompt ends inside of it, the model never sees it."""
    template = "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} "
    template += f"{before}{{% else %}}{{% generation %}}"
    template += f"{{{{ m.content }}}}{{% endgeneration %}}{after}{{% endif %}}{{% endfor %}}"
    encoder = encoder_of(tokenizer_with(template))
    assert len(encoder.tokenizer("Maria", add_special_tokens=False)["input_ids"]) == 1
    encoded = one(encoder, example([TURNS[0], {"role": "assistant", "content": content}]))
    assert encoded.merged is merged


def test_real_rows_have_the_same_mask_by_marks_and_turn_by_turn() -> None:
    tokenizer = tokenizer_with()
    assert encoding.MARKS.search(tokenizer.chat_template)
    bare = re.sub(
        r"generation (-?%)", r"if true \1", tokenizer.chat_template.replace("endgeneration", "endif")
    )
    encoders = [encoder_of(found) for found in (tokenizer, tokenizer_with(bare))]
    assert [encoder.way for encoder in encoders] == ["marks", "turns"]
    rows = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()[:100]]
    examples = [example(row["messages"]) for row in rows]
    marked, derived = (encoder(examples) for encoder in encoders)
    assert marked == derived and all(isinstance(row, encoding.Encoded) and row.trained for row in marked)


def test_without_a_template_only_chats_are_an_error() -> None:
    bare = tokenizer_with()
    bare.chat_template = None
    with pytest.raises(UserError, match=r"no chat template(.|\n)*chatml"):
        encoder_of(bare)
    encoded = one(encoder_of(bare, chats=False), Example("a:1", prompt="a b", completion=" c"))
    assert bare.decode([label for label in encoded.labels() if label != -100]) == " c<|im_end|>"


def test_a_template_is_named_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{# é #}{{ 1 }}")
    assert chat_templates.read_template(str(tmp_path / "mine.jinja")) == "{# é #}{{ 1 }}"
    with pytest.raises(UserError, match="unknown chat template") as raised:
        chat_templates.read_template("quen3")
    assert "help:      chat_template: qwen3" in str(raised.value)
    (tmp_path / "mine.jinja").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        chat_templates.read_template(str(tmp_path / "mine.jinja"))


def test_marks_that_begin_inside_of_the_prompt_leave_it_untrained() -> None:
    template = chat_templates.read_template("chatml").replace(
        "'<|im_start|>' + message['role'] + '\\n'", "'<|im_start|>'"
    )
    template = template.replace("{%- generation -%}{{-", "{%- generation -%}{{- 'assistant\\n' +")
    template = template.replace("{{- message['content']", "{{- message['role'] + '\\n' + message['content']")
    encoder = encoder_of(tokenizer_with(template))
    (rendered,) = encoder.render([example(TURNS)])
    assert rendered and rendered.text.count("<|im_start|>assistant\nMaria did.<|im_end|>") == 1
    start, end = rendered.spans[0]
    assert rendered.text[start:end] == "assistant\nMaria did.<|im_end|>"
    assert trained(encoder, TURNS) == "Maria did.<|im_end|>Omar.<|im_end|>"


def test_what_ends_a_turn_is_what_the_model_declares_too(weightless: Path) -> None:
    """GLM-4.5 declares <|user|>, which its template writes after each answer."""
    tokenizer = tokenizer_with(chat_templates.read_template("glm4moe"))
    tokenizer.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    word, user = tokenizer.convert_tokens_to_ids(["the", "<|user|>"])
    config = weightless / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [word, user]}))
    declared = declared_ends(Model(name=str(weightless)))
    assert declared == {word, user}
    encoder = encoding.make_encoder(tokenizer, Data(name="-"), True, declared)
    last = one(encoder, example(TURNS)).labels()[-1]
    assert last == user and user in encoder.stops and user not in encoder_of(tokenizer).stops
    assert word not in encoder.stops, "a word of the text, as a config's defaults may name"
    config.unlink()
    own = json.loads((weightless / "config.json").read_text())
    assert declared_ends(Model(name=str(weightless))) == {own["eos_token_id"]}


def test_the_end_of_a_message_ends_no_turn_of_gpt_oss() -> None:
    tokenizer = tokenizer_with(chat_templates.read_template("gptoss"))
    tokenizer.add_tokens(["<|end|>"], special_tokens=True)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end in encoding.stop_ids(tokenizer), "of Phi-3"
    tokenizer.add_tokens(["<|return|>"], special_tokens=True)
    tokenizer.eos_token = "<|return|>"
    assert end not in encoding.stop_ids(tokenizer) and tokenizer.eos_token_id in encoding.stop_ids(tokenizer)
    thought = [TURNS[0], {**TURNS[1], "thinking": "Who?"}]
    assert trained(encoder_of(tokenizer), thought).endswith("Maria did.<|return|>")


def test_chats_with_tools_have_the_template_that_the_tokenizer_has_for_them(weightless: Path) -> None:
    own = json.loads((weightless / "tokenizer_config.json").read_text())
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    turn += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    named = {"default": turn, "tool_use": "{{ tools | tojson }}" + turn}
    own["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (weightless / "tokenizer_config.json").write_text(json.dumps(own))
    (weightless / "chat_template.jinja").unlink(missing_ok=True)
    base = Model(name=str(weightless))
    tokenizer: Any = load_tokenizer(base)
    assert foreign_template(base, tokenizer) == []
    encoder = encoder_of(tokenizer)
    tools = [{"name": "look", "parameters": {}}]
    chats = [convert(Row({"messages": TURNS, **more}, "a:1"), Data(name="-"), "messages")
             for more in ({"tools": tools}, {}, {"tools": tools})]  # fmt: skip
    for found, prompt, chosen in zip(encoder(chats), encoder.prompts(chats), chats, strict=True):
        assert isinstance(found, encoding.Encoded)
        whole = tokenizer.apply_chat_template(chosen.messages, tools=chosen.tools, tokenize=False)
        assert tokenizer.decode(found.ids) == whole and ("look" in whole) == bool(chosen.tools)
        assert found.ids[: len(prompt)] == prompt and found.trained[-1][0] == len(prompt)
    tokenizer.save_pretrained(weightless)  # in files of their own
    assert foreign_template(base, load_tokenizer(base)) == []
    tokenizer.chat_template = {"tool_use": turn}
    with pytest.raises(UserError, match="none of the tokenizer's chat templates is the default"):
        encoder_of(tokenizer)


def test_a_template_that_makes_no_prompt_is_refused_before_anything_trains() -> None:
    """Its marked twin names no BOS, which this tokenizer lacks."""
    tokenizer = tokenizer_with(chat_templates.read_template("llama3"))
    with pytest.raises(
        UserError, match=r"data.chat_template: .* can't render a prompt(.|\n)*'bos_token' is undefined"
    ):
        encoder_of(tokenizer)


def test_a_held_out_row_without_a_prompt_is_found_at_the_audit(tmp_path: Path) -> None:
    """DeepSeek V3's own template joins a call's arguments as text; its marked twin takes them as they are."""
    call = {"function": {"name": "look", "arguments": {"at": "door"}}}
    turns = [TURNS[0], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Omar"}]
    for name, messages in (("a", TURNS), ("b", [*turns, TURNS[3]])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    data = Data(name=str(tmp_path / "a.jsonl"), validation=str(tmp_path / "b.jsonl"), cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"can\'t render a prompt \(.*b.jsonl:1\)"):
        prepare(data, tokenizer_with(chat_templates.read_template("deepseekv3")), 0, None)


def test_equal_rows_in_one_batch_are_encoded_as_each_alone() -> None:
    for template in (
        None,
        "{{ messages[0].content }}: {% generation %}{{ messages[-1].content }}<|im_end|>{% endgeneration %}",
    ):
        encoder = encoder_of(tokenizer_with(template))
        alone = one(encoder, example(TURNS[:2]))
        assert encoder([example(TURNS[:2])] * 3) == [alone] * 3 and alone.trained
