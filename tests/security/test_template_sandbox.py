"""Templates are programs of others: each under its limits, in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from finetune.core.errors import UserError
from finetune.data import chat_templates, chat_texts, content_check, encoding, template_sandbox
from finetune.data.examples import BadRow
from finetune.data.template_sandbox import ChatTemplate
from finetune.export import ollama_export
from finetune.recipe.schema import Data
from support.chat_tokenizers import TURNS, encoder_of, example, tokenizer_with
from support.soak import soak_except

ASKED: list[tuple[Any, Any]] = [([{"role": "user", "content": "Who came?"}], None)]
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
ENDLESS += "{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
)
RECURSIVE = "{% macro m(x) %}{{ m(x + 1) }}{% endmacro %}{{ m(0) }}"
TWICE = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
SQUARES = "{% set n = namespace(x=7) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}"
SLOW = {
    "endless loops": (ENDLESS, "more than 5,000,000 loop iterations", 60),
    "a macro that calls itself twice": (TWICE, "the template", 300),
    "products in C": (SQUARES, "30 s of the processor's time", 300),  # where no Python runs meanwhile
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
    "a power in C": ("{{ 10 ** (10 ** 8) % 7 }}", "100,000 bits"),
    "a list repeated": ("{{ ([0] * 10 ** 9) | length }}", "256 MB"),
    "a macro that calls itself": (RECURSIVE, "recursion"),
    "half a character": (r"{{ '\ud83d' }}", "surrogates"),
    "no template": ("{% nonsense %}", "not valid"),
}


def answer(template: str, chats: list[tuple[Any, Any]] = ASKED) -> list[template_sandbox.Rendered]:
    return template_sandbox.render(ChatTemplate(template, {}), chats)


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def attack(template: str, says: str, seconds: float = 60) -> None:
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
@pytest.mark.parametrize("name", soak_except(["endless loops"], SLOW))
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
    with pytest.raises(UserError, match=r"the chat template is not valid(.|\n)*loop iterations"):
        encoding.make_encoder(tokenizer, Data(name="-"), chats=True)
    assert time.monotonic() - started < 60


def test_a_limit_does_not_depend_on_how_busy_the_machine_is() -> None:
    """The same loop passes or does not, however long it takes."""
    loop = "{{% for a in range(1000) %}}{{% for b in range({}) %}}{{% endfor %}}{{% endfor %}}{{{{ 'x' }}}}"
    (most,) = answer(loop.format(4999))
    assert most.text == "x"
    (more,) = answer(loop.format(5000))
    assert "more than 5,000,000 loop iterations" in more.error


def test_many_renderings_may_not_take_long_together() -> None:
    """Each is under the limit of one. 70 examples of a second each would be a minute in `check`."""
    loop = "{{{{ messages[0].content }}}}"
    loop += "{{% for a in range(1000) %}}{{% for b in range({}) %}}{{% endfor %}}{{% endfor %}}"
    found = answer(loop.format(4000), ASKED * 72)
    assert found[0].text == "Who came?" and not found[0].error
    stopped = [one for one in found if "took more than 50,000 loop iterations each" in one.error]
    assert len(stopped) >= 70 and found[-1] in stopped
    assert not any(one.error for one in answer(loop.format(40), ASKED * 72))
    long = "{% for m in messages %}{% for o in messages %}{% endfor %}{% endfor %}x"  # looks back
    assert not any(one.error for one in answer(long, [(turns(1000), None)] * 10))


def test_filters_of_many_renderings_may_not_take_long_together() -> None:
    """Filters run without loops of the template, so they count no iterations."""
    began = time.monotonic()
    slow = "{% set z = range(99999)|map('string')|map('upper')|list %}" * 20
    found = answer("{{ messages[0].content }}" + slow, ASKED * 24)
    assert found[0].text == "Who came?" and not found[0].error
    assert "took more than 0.05 s of the processor's time each" in found[-1].error
    assert time.monotonic() - began < 30


def test_long_texts_of_many_renderings_are_refused_together() -> None:
    found = answer("{{ messages[0].content }}{{ 'word ' * 2400000 }}", ASKED * 8)
    assert not found[0].error
    assert all("wrote more than 50,000 characters each" in one.error for one in found[2:])
    assert not any(one.error for one in answer("{{ messages[0].content }}{{ 'word ' * 9000 }}", ASKED * 500))


def turns(count: int) -> list[dict[str, Any]]:
    pair = ({"role": "user", "content": "Who came?"}, {"role": "assistant", "content": "Maria did."})
    return [
        dict(pair[number % 2], content=f"{number} {pair[number % 2]['content']}") for number in range(count)
    ]


CHATML = "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '</s>\n' }}{% endfor %}"
CHATML += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("agent", [False, True])
def test_a_long_chat_is_rendered_turn_by_turn_as_a_short_one(agent: bool) -> None:
    messages = turns(60)
    if agent:  # one question, and a tool's result after each answer
        messages = [turns(1)[0]] + [
            {**turn, "role": "tool"} if i % 2 else turn for i, turn in enumerate(turns(61)[1:])
        ]
    ((text, spans, error),) = template_sandbox.render(ChatTemplate(CHATML, {}), [(messages, None)], "turns")
    own = [message["content"] for message in messages if message["role"] == "assistant"]
    assert not error and [text[start:end] for start, end in spans] == [f"{content}</s>\n" for content in own]


def test_a_template_that_numbers_its_turns_is_rendered_exactly() -> None:
    """What a turn adds depends on all before it: its neighbors are not enough."""
    numbered = CHATML.replace("'>' ~", "loop.index ~ '>' ~").replace(
        "<assistant>", "<assistant{{ messages | length + 1 }}>"
    )
    messages = turns(40)
    ((text, spans, error),) = template_sandbox.render(ChatTemplate(numbered, {}), [(messages, None)], "turns")
    own = [f"{message['content']}</s>\n" for message in messages[1::2]]
    assert not error and [text[start:end] for start, end in spans] == own


def test_a_late_turn_that_is_rendered_otherwise_later_is_an_error() -> None:
    hidden = CHATML.replace("m.content", "(m.content if loop.last or loop.index != 30 else 'gone')")
    ((_, _, error),) = template_sandbox.render(ChatTemplate(hidden, {}), [(turns(40), None)], "turns")
    assert "renders turn by turn" in error


def test_rendering_time_is_linear_in_the_number_of_turns() -> None:
    """A chat of 6,000 turns takes 3 s; to render each prefix took minutes."""
    ((_, spans, error),) = template_sandbox.render(ChatTemplate(CHATML, {}), [(turns(6000), None)], "turns")
    assert not error and len(spans) == 3000


def test_one_row_that_kills_the_process_does_not_take_the_others_with_it() -> None:
    """Memory is limited whatever the chats are: the process dies of one, and answers the rest."""
    huge = [{"role": "user", "content": "x" * 150_000_000}]
    child = template_sandbox._child(os.getpid())
    before = child.process.pid
    found = answer(PLAIN, [*ASKED, (huge, None), *ASKED])
    assert [text.text for text in found] == ["Who came?", "", "Who came?"]
    assert "256 MB" in found[1].error and child.process.pid != before


def test_chats_after_a_rendering_that_takes_too_long_are_not_rendered(monkeypatch) -> None:
    """Each would take as long."""
    child = template_sandbox._child(os.getpid())
    exchange, asked = child._exchange, list[int]()

    def ends_as_at_the_limit(head: str, chats: list[str]) -> Any:
        asked.append(len(chats))
        limit = threading.Timer(3.0, lambda: os.kill(child.process.pid, signal.SIGPROF))
        limit.start() if any("now" in chat for chat in chats) else None
        return exchange(head, chats)

    monkeypatch.setattr(child, "_exchange", ends_as_at_the_limit)
    slow = "{% if messages[0].content == 'now' %}" + SQUARES + "{% endif %}"
    now = [([{"role": "user", "content": "now"}], None)]
    found = answer(slow, [*ASKED, *now * 4])
    assert [one.error.startswith("the template was stopped") for one in found] == [False, *[True] * 4]
    assert asked == [5, 1, 1]


def test_process_that_the_system_kills_is_not_said_to_be_too_large() -> None:
    child = template_sandbox._child(os.getpid())
    answer(PLAIN)
    killer = threading.Timer(1.0, child.process.kill)
    killer.start()
    (found,) = answer(SQUARES)  # it would run for 30 s
    killer.join()
    assert "was killed" in found.error and "256 MB" not in found.error


def test_a_process_that_something_else_ended_is_begun_again() -> None:
    encoder = encoder_of(tokenizer_with(chat_templates.read_template("chatml")))
    before = encoder.render([example(TURNS)])
    child = template_sandbox._child(os.getpid())
    child.process.kill()
    child.process.wait()
    assert encoder.render([example(TURNS)]) == before and before[0]


def test_process_that_hangs_is_replaced(monkeypatch) -> None:
    monkeypatch.setattr(template_sandbox, "HANGS", 1)
    chats: Any = [(TURNS, None)] * 2
    template = ChatTemplate("{{ messages | length }}", {})
    assert template_sandbox.render(template, chats)[0].text == str(len(TURNS))
    child = template_sandbox._child(os.getpid())
    os.kill(child.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    assert [one.text for one in template_sandbox.render(template, chats)] == [str(len(TURNS))] * 2
    os.kill(child.process.pid, signal.SIGSTOP)
    (found,) = template_sandbox.render(template, chats[:1])
    assert "did nothing" in found.error and time.monotonic() - began < 20


def test_more_text_than_the_child_holds_at_once_is_sent_in_portions() -> None:
    content = "word " * 400_000
    chats: list[tuple[Any, Any]] = [
        ([{"role": "user", "content": f"{n} {content}"}], None) for n in range(50)
    ]
    before = template_sandbox._child(os.getpid()).process.pid
    found = answer(PLAIN, chats)
    assert [text.text for text in found] == [f"{n} {content}" for n in range(50)]
    assert template_sandbox._child(os.getpid()).process.pid == before, "it did not die of it"


def test_an_interrupt_between_question_and_answer_does_not_mix_up_the_next() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    answer(PLAIN)
    os.kill(template_sandbox._child(os.getpid()).process.pid, signal.SIGSTOP)
    old = signal.signal(signal.SIGUSR1, interrupt)
    # To the main thread: a signal to the process may reach another thread, and would not end the wait
    later = threading.Timer(1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    later.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            answer(PLAIN)  # the signal comes in between
    finally:
        later.join()
        signal.signal(signal.SIGUSR1, old)
    assert answer(PLAIN)[0].text == "Who came?"


def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = "import os; from finetune.data.template_sandbox import ChatTemplate, render, _child\n"
    program += "render(ChatTemplate('x', {}), [([], None)])\n"
    program += "print(_child(os.getpid()).process.pid, flush=True)\n"
    program += "os.kill(os.getpid(), 9)"  # no chance to clean up
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return  # a zombie is init's to reap, whose child it is now
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_the_child_imports_little() -> None:
    program = "import sys; from finetune.data.template_sandbox import _import_upstream\n"
    program += "print(_import_upstream().__name__, len({'torch', 'huggingface_hub'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["transformers.utils.chat_template_utils", "0"]


FEW = "{% if messages | length in (4, 5) %}{{ raise_exception('too few') }}{% endif %}"


@pytest.mark.parametrize("refusal", [FEW, FEW.replace("raise_exception('too few')", "1 + 'a'")])
def test_a_template_that_refuses_a_shortened_chat_renders_the_whole_chat(refusal: str) -> None:
    """A late turn is looked for in a shortened chat first."""
    messages = turns(30)
    late = refusal.replace("%}{{", " and messages[1].content != '1 Maria did.' %}{{", 1)
    template = ChatTemplate(late + CHATML, {})
    ((text, spans, error),) = template_sandbox.render(template, [(messages, None)], "turns")
    own = [f"{message['content']}</s>\n" for message in messages[1::2]]
    assert not error and [text[start:end] for start, end in spans] == own


def test_template_that_never_ends_for_the_chats_of_an_export_is_stopped() -> None:
    """An export renders chats that no earlier step renders."""
    guarded = f"{{% if messages[0].content == 'qzuser' %}}{ENDLESS}{{% endif %}}{PLAIN}"
    tokenizer = tokenizer_with(guarded)
    with pytest.raises(UserError, match="loop iterations"):
        ollama_export.parts_of(tokenizer, opens=False)
    with pytest.raises(ValueError, match="loop iterations"):
        chat_texts.render_chat(tokenizer, [{"role": "user", "content": "qzuser"}])


def test_render_chat_writes_what_transformers_writes() -> None:
    tokenizer, tool = tokenizer_with(), {"type": "function", "function": {"name": "add"}}
    for chat, tools in ((TURNS, None), (TURNS[:1], [tool])):
        wanted = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
        assert chat_texts.render_chat(tokenizer, chat, tools) == wanted


MARKED_ROLES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role in ROLES %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("roles", [["user"], ["user", "assistant"], ["user", "system"]])
def test_a_template_that_marks_turns_of_the_user_trains_on_no_example(roles: list[str]) -> None:
    """The model would be trained to write the user's turns."""
    turns = [
        {"role": "user", "content": "Is it so?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "end"},  # also in <|im_end|>
        {"role": "assistant", "content": "end"},
    ]
    for marked, wrong in (roles, True), (["assistant"], False):
        (made,) = encoder_of(tokenizer_with(MARKED_ROLES.replace("ROLES", str(marked))))([example(turns)])
        assert isinstance(made, BadRow) == wrong
        if isinstance(made, BadRow):
            assert made.problem.found == "Is it so?" and "content of the user" in made.problem.what


MARKS = {
    "tool results too": ("m.role in ('assistant', 'tool')", "@{{ m.content }}<|im_end|>#"),
    "system messages too": ("m.role in ('assistant', 'system')", "@{{ m.content }}<|im_end|>#"),
    "the last answer alone": ("m.role == 'assistant' and loop.last", "@{{ m.content }}<|im_end|>#"),
    "the first answer alone": ("m.role == 'assistant' and loop.index < 4", "@{{ m.content }}<|im_end|>#"),
    "the end of turn alone": ("m.role == 'assistant'", "{{ m.content }}@<|im_end|>#"),
    "half of each answer": ("m.role == 'assistant'", "{{ m.content[:8] }}@{{ m.content[8:] }}<|im_end|>#"),
    "": ("m.role == 'assistant'", "@{{ m.content }}<|im_end|>#"),
    "answers in parts": ("m.role == 'assistant'", "@{{ m.content[:8] }}#@{{ m.content[8:] }}#@<|im_end|>#"),
    "answers without their reasoning": (
        "m.role == 'assistant'",
        "{% set p = m.content.partition('</think>') %}{{ p[0] }}{{ p[1] }}@{{ p[2] }}<|im_end|>#",
    ),
}


@pytest.mark.parametrize("case", MARKS)
def test_template_whose_marks_hold_other_parts_than_whole_answers_is_refused(case: str) -> None:
    turns = [
        {"role": "system", "content": "You help with the weather."},
        {"role": "user", "content": "How is the weather today?"},
        {
            "role": "assistant",
            "content": "I will look at it now." if "reason" not in case else "Hm?</think>Yes.",
        },
        {"role": "tool", "content": "sunny with 20 degrees"},
        {
            "role": "assistant",
            "content": "It is sunny and windy outside." if "reason" not in case else "Oh</think>No.",
        },
    ]
    condition, marked = MARKS[case]
    marked = marked.replace("@", "{% generation %}").replace("#", "{% endgeneration %}")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if " + condition + " %}" + marked
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip
    (made,) = encoder_of(tokenizer_with(template))([example(turns)])
    assert isinstance(made, BadRow) == (
        case not in ("", "answers in parts", "answers without their reasoning")
    )
    if isinstance(made, BadRow):
        what = made.problem.what
        assert "marks results of tools" in what or "marks system messages" in what or "whole answer" in what


CALLS = {
    "": "{{ system }}{{ user }}@{{ m.content }}{{ call }}<|im_end|>#",
    "calls before the marks": "{{ system }}{{ user }}{{ call }}@{{ m.content }}<|im_end|>#",
    "tools in the marks": "{{ user }}@{{ system }}{{ m.content }}{{ call }}<|im_end|>#",
}


@pytest.mark.parametrize("case", CALLS)
def test_template_whose_marks_leave_out_calls_or_hold_tools_is_refused(case: str) -> None:
    function = {"name": "weather", "description": "Return the weather of a town.", "parameters": {}}
    call = {"type": "function", "function": {"name": "weather", "arguments": {"town": "Turin", "hot": True}}}
    turns = [
        {"role": "user", "content": "Is it hot?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
    ]
    marked = CALLS[case].replace("@", "{% generation %}").replace("#", "{% endgeneration %}")
    template = (
        "{% set m = messages[1] %}{% set user %}{{ messages[0].content }}{% endset %}"
        "{% set system %}{{ tools | tojson }}{% endset %}"
        "{% set call %}{{ m.tool_calls[0].function | tojson }}{% endset %}"
        "{% if m %}" + marked + "{% endif %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    tools = [{"type": "function", "function": function}]
    (made,) = encoder_of(tokenizer_with(template))([dataclasses.replace(example(turns), tools=tools)])
    assert isinstance(made, BadRow) == bool(case)
    if isinstance(made, BadRow):
        assert made.problem.found in ("weather", "Return the weather of a town.")


def test_the_search_for_marked_turns_of_the_user_takes_linear_time() -> None:
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 10_000]
    started = time.process_time()
    for text in ("u a " * 1_000_000, "a" * 4_000_000):
        assert content_check.misplaced(example(turns), text, [[2, 4]]), "one of many answers is marked"
    assert time.process_time() - started < 2


def test_the_search_for_marked_tool_calls_takes_linear_time() -> None:
    arguments = {f"name{number}": f"value{number}" for number in range(40_000)}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "tool_calls": [call]}]
    text = f"Q A look {json.dumps(arguments)}"
    started = time.process_time()
    assert content_check.misplaced(example(turns), text, [[2, len(text)]]) is None
    assert time.process_time() - started < 2
