"""Templates under their limits, and which tokens carry loss whatever a template or a text does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import DATA, MODEL
from test_shared_assets import ASSETS

from finetune.data import bundled, chat, render
from finetune.data.formats import BadRow, Example, Row, convert
from finetune.errors import UserError
from finetune.model import load_tokenizer
from finetune.sections import Data, Model

ASKED: list[tuple[Any, Any]] = [([{"role": "user", "content": "Who came?"}], None)]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
ENDLESS += "{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
)
RECURSIVE = "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}"
SLOW = {
    "endless loops": (ENDLESS, "more than 5 s", 9),
    "a power in C": (
        "{{ 10 ** (10 ** 8) % 7 }}",
        "more than 5 s or 256 MB",
        15,
    ),  # 6 s of the processor's time
}
QUICK = {
    "a long text": ("{{ 'x' * 10 ** 9 }}", "256 MB"),
    "a text that doubles": (DOUBLING, "256 MB"),
    "a text that fits in memory": ("{{ 'x' * 20000000 }}", "characters"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals": ("{{ raise_exception.__globals__['__builtins__'] }}", "unsafe"),
    "a file included": ("{% include '/etc/hostname' %}", "no loader"),
    "a file imported": ("{% import '/etc/hostname' as x %}", "no loader"),
    "a long range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "a list repeated": ("{{ ([0] * 10 ** 9) | length }}", "256 MB"),
    "a macro that calls itself": (RECURSIVE, "recursion"),
    "half a character": (r"{{ '\ud83d' }}", "surrogates"),
    "no template": ("{% nonsense %}", "broken"),
}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Maria did."},
    {"role": "user", "content": "And who left?"},
    {"role": "assistant", "content": "Omar."},
]


def answer(template: str, chats: list[tuple[Any, Any]] = ASKED) -> list[render.Rendered]:
    return render.render(template, {}, "none", chats)


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def attack(template: str, says: str, seconds: float = 9) -> None:
    """An error for the row, in time and in little memory, and the next template works as ever."""
    others, before, started = children(), psutil.Process().memory_info().rss, time.monotonic()
    (found,) = answer(template)
    assert time.monotonic() - started < seconds and says in found.error, found.error
    assert psutil.Process().memory_info().rss - before < 300 * 2**20
    assert answer(PLAIN)[0] == ("Who came?", [], "")
    new = [child for child in children() if child not in others]
    assert not [child for child in new if child.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.alone
@pytest.mark.parametrize("name", QUICK)
def test_a_template_that_wants_too_much_is_an_error_of_its_row(name: str) -> None:
    attack(*QUICK[name])


@pytest.mark.alone
@pytest.mark.parametrize("name", SLOW)
def test_a_template_that_never_ends_is_stopped(name: str) -> None:
    count = len(children())
    attack(*SLOW[name])
    assert len(children()) == max(count, 1)


@pytest.mark.alone
def test_a_template_that_never_ends_is_an_error_before_any_row() -> None:
    """Four thousand rows of five seconds each would be a day."""
    tokenizer = tokenizer_with(ENDLESS)
    answer(PLAIN)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"the chat template is broken(.|\n)*more than 5 s"):
        chat.make_encoder(tokenizer, Data(name="-"), chats=True)
    assert time.monotonic() - started < 9


def test_one_row_that_kills_the_process_does_not_take_the_others_with_it() -> None:
    """Memory is limited whatever the chats are: the process dies of one, and answers the rest."""
    huge = [{"role": "user", "content": "x" * 150_000_000}]
    child = render._child(os.getpid())
    before = child.process.pid
    found = answer(PLAIN, [*ASKED, (huge, None), *ASKED])
    assert [text.text for text in found] == ["Who came?", "", "Who came?"]
    assert "256 MB" in found[1].error and child.process.pid != before


def test_a_process_that_something_else_ended_is_begun_again() -> None:
    encoder = encoder_of(tokenizer_with(bundled.read_template("chatml")))
    before = encoder.render([example(TURNS)])
    child = render._child(os.getpid())
    child.process.kill()
    child.process.wait()
    assert encoder.render([example(TURNS)]) == before and before[0]


def test_more_text_than_the_child_holds_at_once_is_sent_in_portions() -> None:
    content = "word " * 400_000
    chats: list[tuple[Any, Any]] = [
        ([{"role": "user", "content": f"{n} {content}"}], None) for n in range(50)
    ]
    before = render._child(os.getpid()).process.pid
    found = answer(PLAIN, chats)
    assert [text.text for text in found] == [f"{n} {content}" for n in range(50)]
    assert render._child(os.getpid()).process.pid == before, "it did not die of it"


def test_an_interrupt_between_question_and_answer_does_not_mix_up_the_next() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    answer(PLAIN)
    old = signal.signal(signal.SIGUSR1, interrupt)
    killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -USR1 {os.getpid()}"])
    try:
        with pytest.raises(KeyboardInterrupt):
            answer(ENDLESS)
    finally:
        signal.signal(signal.SIGUSR1, old)
        killer.wait()
    assert answer(PLAIN)[0].text == "Who came?"


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = "import os; from finetune.data.render import render, _child\n"
    program += "render('x', {}, 'none', [([], None)]); print(_child(os.getpid()).process.pid, flush=True)\n"
    program += "os.kill(os.getpid(), 9)"  # no chance to clean up
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return  # a zombie is init's to reap, whose child it is now
        time.sleep(0.05)
    raise AssertionError("it is still there")


# ---- from texts to masks


def tokenizer_with(template: str | None = None, bos: bool = False) -> Any:
    """The embedded tokenizer; with `bos`, one that begins every text with <s>."""
    from tokenizers.processors import TemplateProcessing

    tokenizer: Any = load_tokenizer(Model(name=str(MODEL)), template)
    if bos:
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        begin = [("<s>", tokenizer.bos_token_id)]
        processor = TemplateProcessing(single="<s> $A", special_tokens=begin)
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def encoder_of(tokenizer: Any, chats: bool = True, **data: Any) -> chat.Encoder:
    return chat.make_encoder(tokenizer, Data(name="-", **data), chats)


def example(messages: list[dict[str, Any]]) -> Example:
    return convert(Row({"messages": messages}, "a:1"), Data(name="-"), "messages")


def one(encoder: chat.Encoder, found: Example) -> chat.Encoded:
    (encoded,) = encoder([found])
    assert isinstance(encoded, chat.Encoded), encoded
    assert len(encoded.labels()) == len(encoded.ids)
    return encoded


def trained(encoder: chat.Encoder, messages: list[dict[str, Any]]) -> str:
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
    template = bundled.read_template("qwen3")
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
    template = "{{ bos_token }}" + bundled.read_template("chatml")
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
        ("chatml", {"tool_calls": [{"name": "look"}]}, "leaves tool calls out"),
        ("phi3", {"role": "tool", "content": "Omar"}, "leaves tool results out"),
        ("llama3", {"reasoning": "Two names."}, "leaves reasoning out"),
    ],
)
def test_what_a_template_has_no_place_for_is_an_error_of_the_row(family: str, turn: Any, says: str) -> None:
    messages = [TURNS[0], {**TURNS[1], **turn}]
    if turn.get("role") == "system":
        messages = [turn, *TURNS]
    elif turn.get("role") == "tool":
        messages = [*TURNS[:2], turn, TURNS[3]]
    bad = refused(bundled.read_template(family), messages)
    assert says in bad.problem.what + bad.problem.found and bad.kind == "malformed"


def test_an_answer_that_ends_in_an_emoji_of_several_tokens_is_trained_whole() -> None:
    tokenizer = tokenizer_with()
    assert len(tokenizer("🦙", add_special_tokens=False)["input_ids"]) > 1
    marks_content_only = bundled.read_template("chatml").replace(
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
    assert chat.MARKS.search(tokenizer.chat_template)
    bare = re.sub(
        r"generation (-?%)", r"if true \1", tokenizer.chat_template.replace("endgeneration", "endif")
    )
    encoders = [encoder_of(found) for found in (tokenizer, tokenizer_with(bare))]
    assert [encoder.way for encoder in encoders] == ["marks", "turns"]
    rows = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()[:100]]
    examples = [example(row["messages"]) for row in rows]
    marked, derived = (encoder(examples) for encoder in encoders)
    assert marked == derived and all(isinstance(row, chat.Encoded) and row.trained for row in marked)


def test_without_a_template_only_chats_are_an_error() -> None:
    bare = tokenizer_with()
    bare.chat_template = None
    with pytest.raises(UserError, match=r"no chat template(.|\n)*chatml"):
        encoder_of(bare)
    encoded = one(encoder_of(bare, chats=False), Example("a:1", prompt="a b", completion=" c"))
    assert bare.decode([label for label in encoded.labels() if label != -100]) == " c<|im_end|>"


def test_a_template_is_named_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("é")
    assert bundled.read_template(str(tmp_path / "mine.jinja")) == "é"
    with pytest.raises(UserError, match="no such template") as raised:
        bundled.read_template("quen3")
    assert "try:       qwen3" in str(raised.value)
    (tmp_path / "mine.jinja").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        bundled.read_template(str(tmp_path / "mine.jinja"))


def test_marks_that_begin_inside_of_the_prompt_leave_it_untrained() -> None:
    template = bundled.read_template("chatml").replace(
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


def test_equal_rows_in_one_batch_are_encoded_as_each_alone() -> None:
    for template in (
        None,
        "{{ 'Rows: ' }}{% generation %}{{ messages[1].content }}<|im_end|>{% endgeneration %}",
    ):
        encoder = encoder_of(tokenizer_with(template))
        alone = one(encoder, example(TURNS[:2]))
        assert encoder([example(TURNS[:2])] * 3) == [alone] * 3 and alone.trained
