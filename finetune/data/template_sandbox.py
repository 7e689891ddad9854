"""Templates, rendered in a process of their own under limits of time and memory.

A template is a program that came with somebody's model or task file. Jinja's sandbox keeps it from files and
attributes; it does not keep it from running for ever or taking all memory. So it runs in a child: 5 s a row,
256 MB.
The child also works beside the tokenizer, on the other core.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 5
MEGABYTES = 256
LONGEST = 16 * 2**20  # characters of a rendered chat
PORTION = 4 * 2**20  # characters sent at once: the child's memory is for what the template makes of them
BROKEN = ("the template is broken", "the template took more")
"""How errors begin that don't depend on the chat."""


class Rendered(NamedTuple):
    """One chat as text, and the characters [start, end) of each of the assistant's turns."""

    text: str
    spans: list[list[int]]
    error: str


def render_row(template: str, row: dict[str, Any], *, way: str = "row") -> Rendered:
    """Render a row of an evaluation as lm-eval does: names that are not there are errors.

    Args:
        row: what JSON has no form for is rendered as its text.
        way: `without nulls`: to write one is an error too, not the text "None"; `expression`: `template` is
            what would stand between `{{` and `}}`; the text is its value as JSON.
    """
    plain = json.loads(json.dumps(row, default=str))
    request = {"template": template, "way": way}
    return Rendered(*_child(os.getpid()).ask(request, [plain])[0])


def render(
    template: str,
    special: dict[str, Any],
    way: str,
    chats: list[tuple[Any, Any]],
    prompt: bool = False,
    after_turn: str = "",
) -> list[Rendered]:
    """Render chats with a template.

    Args:
        template: Jinja source.
        special: the tokenizer's special tokens, which templates name (`bos_token` ...).
        way: how the assistant's turns are found: `marks` (`{% generation %}`), `turns` (each text must be the
            beginning of the next) or `none`.
        chats: messages and tools (or None) of each.
        prompt: end where the assistant is to go on.
        after_turn: what the template writes after the end of the last turn; no turn includes it.
    """
    child = _child(os.getpid())  # a forked data loader worker needs one of its own
    request = {"template": template, "special": special, "way": way, "prompt": prompt, "after": after_turn}
    return [Rendered(*answer) for answer in child.ask(request, chats)]


def joined(spans: list[list[int]]) -> list[list[int]]:
    """Spans that touch are one turn's, which a template may mark in several parts."""
    found: list[list[int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found


def start() -> None:
    """Start the rendering process, which takes a second, beside what else there is to do first."""
    _child(os.getpid())


class Child:
    """The rendering process; it ends with its parent, since its standard input does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.start()
        atexit.register(self.stop)

    def start(self) -> None:
        # -P: this file's folder must not become a place to import from
        command = [sys.executable, "-P", __file__]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # the child may be gone
                    pipe.close()

    def ask(self, request: dict[str, Any], chats: list[Any]) -> list[Any]:
        """The answer to each chat; where the process dies of a chat, that chat's answer is an error."""
        head = json.dumps(request)
        answers = []
        with self.lock:
            for portion in _portions(chats):
                found = self._exchange(head, portion)
                if found is None and len(portion) > 1:
                    found = [answer for chat in portion for answer in self._exchange(head, [chat]) or [DIED]]
                answers += found or [DIED]
        return answers

    def _exchange(self, head: str, chats: list[str]) -> list[Any] | None:
        if self.process.poll() is not None:  # ended by something else than a chat, since the last question
            self._restart()
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        try:
            stdin.write(f'{head[:-1]}, "chats": [{", ".join(chats)}]}}\n'.encode())
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # such as Ctrl-C: the next question must not get this one's answer
            self._restart()
            raise
        if not line.endswith(b"\n"):
            self._restart()
            return None
        return json.loads(line)

    def _restart(self) -> None:
        self.stop()
        self.start()


DIED = ("", (), f"the template took more than {SECONDS} s or {MEGABYTES} MB")


def _portions(chats: list[Any]) -> Iterator[list[str]]:
    """Chats as JSON, so many together as are sent at once."""
    portion: list[str] = []
    size = 0
    for chat in map(json.dumps, chats):
        if portion and size + len(chat) > PORTION:
            yield portion
            portion, size = [], 0
        portion.append(chat)
        size += len(chat)
    if portion:
        yield portion


@cache
def _child(pid: int) -> Child:
    return Child()


class _Refused(Exception):
    """What to say of a chat, as it is."""


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; with its end, this one ends too
    answers_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing but answers goes to the parent
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    signal.signal(signal.SIGALRM, _too_slow)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        of_rows = request["way"] in ("row", "without nulls", "expression")
        answers = _of_rows(request) if of_rows else _answers(request, render_jinja_template)
        answers_to.write(json.dumps(answers).encode() + b"\n")
        answers_to.flush()


def _of_rows(request: dict[str, Any]) -> list[Any]:
    def one(row: dict[str, Any], _: Any) -> tuple[str, tuple[()]]:
        text = _compiled(request["template"], request["way"])(row)
        if len(text) > LONGEST:
            raise _Refused(f"the template took more than {LONGEST} characters")
        text.encode()
        return text, ()

    return [_answer(one, row, None) for row in request["chats"]]


@cache
def _compiled(template: str, way: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    environment.finalize = _not_null if way == "without nulls" else None
    if way != "expression":
        return environment.from_string(template).render
    made = environment.compile_expression(template, undefined_to_none=False)

    def value(row: dict[str, Any]) -> str:
        found = made(row)
        if isinstance(found, StrictUndefined):
            str(found)  # raises, and says what is undefined
        return json.dumps(found)

    return value


def _not_null(value: Any) -> Any:
    if value is None:
        raise _Refused("the template would write a null, as the text None")
    return value


def _regex_replace(text: str, pattern: str, by: str, count: int = 0) -> str:
    return re.sub(pattern, by, text, count=count)


def _answers(request: dict[str, Any], upstream: Any) -> list[Any]:
    """(text, spans, error) of each chat: all in one call, which is faster; one by one if that fails."""
    options = {"chat_template": request["template"], **request["special"]}

    def texts(chats: list[Any], tools: Any, prompt: bool = request["prompt"]) -> list[Any]:
        marks = request["way"] == "marks" and not prompt
        found, spans = upstream(
            chats, tools, add_generation_prompt=prompt, return_assistant_tokens_mask=marks, **options
        )
        for text in found:
            if len(text) > LONGEST:
                raise _Refused(f"the template took more than {LONGEST} characters")
            text.encode()  # half of a surrogate pair is an error here
        return list(zip(found, spans if marks else [()] * len(found), strict=True))

    chats, turns = request["chats"], request["way"] == "turns" and not request["prompt"]
    if len(chats) > 1 and not turns and not any(tools for _, tools in chats):
        with contextlib.suppress(Exception), _limited_time():  # then one by one, each with its own error
            return [(text, spans, "") for text, spans in texts([messages for messages, _ in chats], None)]

    def one(messages: list[Any], tools: Any) -> tuple[Any, Any]:
        return _by_turns(texts, messages, tools, request["after"]) if turns else texts([messages], tools)[0]

    return [_answer(one, messages, tools) for messages, tools in chats]


def _answer(one: Any, messages: list[Any], tools: Any) -> tuple[Any, Any, str]:
    from jinja2 import TemplateSyntaxError

    try:
        with _limited_time():
            return (*one(messages, tools), "")
    except MemoryError:
        error = f"the template took more than {MEGABYTES} MB"
    except TimeoutError:
        error = f"the template took more than {SECONDS} s"
    except TemplateSyntaxError as broken:
        error = f"the template is broken: {broken.message} (its line {broken.lineno})"
    except _Refused as refused:
        error = str(refused)
    except Exception as other:  # a template is a program: it may raise anything
        error = f"the template refuses it: {other}"
    return "", (), error[:300]


def _by_turns(texts: Any, messages: list[Any], tools: Any, after_turn: str) -> tuple[Any, Any]:
    """What an assistant's turn adds to the text so far is the assistant's."""
    ((text, _),) = texts([messages], tools)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            ((before, _),) = texts([messages[:index]], tools, prompt=True)
            ((after, _),) = texts([messages[: index + 1]], tools)
            after = after.removesuffix(after_turn)
            if not (after.startswith(before) and text.startswith(after)):
                raise _Refused("the template neither marks the assistant's tokens nor renders turn by turn")
            spans.append([len(before), len(after)])
    return text, spans


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """An exception after SECONDS; where no Python code runs to raise it, the kernel ends the process."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(*_: object) -> None:
    raise TimeoutError


def _limit_memory() -> None:
    """MEGABYTES more address space than this process has now; only Linux keeps to it."""
    import resource

    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/statm") as file,
    ):  # elsewhere: no such file
        now = int(file.read().split()[0]) * resource.getpagesize()
        limit = now + MEGABYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _serve()
