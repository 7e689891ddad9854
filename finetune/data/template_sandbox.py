"""Render templates in a separate process with limits on operations and memory.

A template is a program that comes with a model or an evaluation task. Jinja's sandbox blocks files and
attributes, but not endless loops or large allocations. So a child process renders it. The child counts loop
iterations and macro calls, and can allocate 256 MB. No limit depends on the load of the machine. The
child also runs in parallel to the tokenizer, on another core.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from jinja2.lexer import TokenStream
    from jinja2.parser import Parser

ITERATIONS = 5_000_000  # maximum loop iterations of one rendering
ON_AVERAGE = 50_000  # maximum loop iterations of a rendering of a chat, on average over all of them
PER_ITERATION = 1e-6
"""Seconds of processor time that a rendering of a chat may take for each of these iterations, on average.

A chat gets the same time for each of its characters. So filters, which count no iterations, are limited too.
"""
PER_RENDERING, PER_CHARACTER = 50_000, 20
"""Characters that a rendering may write on average: for itself, and for each character of its data."""
# Added for each pair of messages, because some templates look back from each message
ITERATIONS_PER_PAIR = 20
LARGEST_POWER = 100_000  # maximum bits of the result of `**`
SECONDS = 30
"""Limit of CPU time for one rendering, for operations that count no iterations, such as huge multiplications.

A rendering over the limit stops the run. It never drops an example.
"""
HANGS = 60  # seconds without processor time after which the process is replaced
MEGABYTES = 256
LONGEST = 16 * 2**20  # characters of a rendered chat
# Characters per request; the child's memory limit should only cover the template's own allocations
PORTION = 4 * 2**20
EXACT_TURNS = 8  # assistant turns that are rendered with their whole prefix; later turns use nearby messages
STOPPED = "the template was stopped"
BROKEN = ("the template is not valid", "the template took more", STOPPED)
"""Prefixes of errors that do not depend on the chat."""


class Rendered(NamedTuple):
    """A rendered chat, and the character range [start, end) of each assistant turn."""

    text: str
    spans: list[list[int]]
    error: str


def render_row(template: str, row: dict[str, Any], *, way: str = "row") -> Rendered:
    """Render a row of an evaluation as lm-eval does. Undefined names are errors.

    Args:
        row: values that JSON cannot represent are converted to text.
        way: `row`, `without nulls` or `expression`. With `without nulls`, a null value in the output is an
            error instead of the text "None". With `expression`, `template` is a Jinja expression, and the
            result is its value as JSON.
    """
    plain = json.loads(json.dumps(row, default=str))
    return Rendered(*_child(os.getpid()).ask({"template": template, "way": way}, [plain])[0])


class ChatTemplate(NamedTuple):
    """A chat template and its variables."""

    source: str
    """The Jinja source."""
    special: Mapping[str, Any]
    """The tokenizer's special tokens, which templates use by name (such as `bos_token`)."""
    date: str | None = None
    """The date for a template that asks for the time. `None` means the current time."""


def render(
    template: ChatTemplate,
    chats: list[tuple[Any, Any]],
    way: str = "none",
    *,
    prompt: bool = False,
    after_turn: str = "",
) -> list[Rendered]:
    """Render chats with a template.

    Args:
        way: how to find the assistant's turns. `marks` uses `{% generation %}`. `turns` requires each text to
            be a prefix of the next. `none` does not search for them.
        chats: (messages, tools or None) of each chat.
        prompt: add the generation prompt.
        after_turn: text that the template writes after the end of the last turn. It belongs to no turn.
    """
    child = _child(os.getpid())  # a forked data loader worker needs its own child
    request = {
        "template": template.source,
        "special": dict(template.special),
        "date": template.date,
        "way": way,
        "prompt": prompt,
        "after": after_turn,
    }
    return [Rendered(*answer) for answer in child.ask(request, chats)]


def joined(spans: list[list[int]]) -> list[list[int]]:
    """Merge spans that touch, because a template can mark one turn in several parts."""
    found: list[list[int]] = []
    for start, end in spans:
        if found and found[-1][1] == start:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found


def start() -> None:
    """Start the rendering process early. It needs a second, which then overlaps with other work."""
    _child(os.getpid())


class Child:
    """The rendering process. It ends with its parent, because its standard input closes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.died: tuple[Any, ...] = ()
        """The answer to the last chat that ended the process."""
        self.start()
        atexit.register(self.stop)

    def start(self) -> None:
        # -P keeps this file's folder off the import path
        command = [sys.executable, "-P", __file__]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # the child may have ended
                    pipe.close()

    def ask(self, request: dict[str, Any], chats: list[Any]) -> list[Any]:
        """Return the answer to each chat. If a chat ends the process, its answer is an error.

        If a rendering takes too long, the chats after it get the same answer and are not rendered.
        """
        head = json.dumps(request)
        answers = list[Any]()
        with self.lock:
            for portion in _portions(chats):
                found = self._exchange(head, portion)
                answers += self._one_by_one(head, portion) if found is None else found
                if answers[-1] == STOPS_ALL:
                    return answers + [STOPS_ALL] * (len(chats) - len(answers))
        return answers

    def _one_by_one(self, head: str, portion: list[str]) -> list[Any]:
        """Return the answers to chats that ended the process together, up to a chat that takes too long."""
        if len(portion) == 1:
            return [self.died]
        answers = list[Any]()
        for chat in portion:
            answers += self._exchange(head, [chat]) or [self.died]
            if answers[-1] == STOPS_ALL:
                break
        return answers

    def _exchange(self, head: str, chats: list[str]) -> list[Any] | None:
        # Something other than a chat ended the process since the last request
        if self.process.poll() is not None:
            self._restart()
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        hung = threading.Event()
        try:
            with _watched(self.process, hung):
                stdin.write(f'{head[:-1]}, "chats": [{", ".join(chats)}]}}\n'.encode())
                stdin.flush()
                line = stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # for example Ctrl-C: the next request must not read this answer
            self._restart()
            raise
        if not line.endswith(b"\n"):
            ended = {-signal.SIGPROF: TOO_SLOW, -signal.SIGKILL: KILLED}.get(self.process.wait(), TOO_LARGE)
            self.died = ("", (), HUNG if hung.is_set() else ended)
            self._restart()
            return None
        return json.loads(line)

    def _restart(self) -> None:
        self.stop()
        self.start()


TOO_SLOW_TOGETHER = f"{STOPPED}: all renderings together took more than {ON_AVERAGE:,} loop iterations each"
TOO_LONG_TOGETHER = (
    f"{STOPPED}: all renderings together took more than {ON_AVERAGE * PER_ITERATION:.2f} s of the "
    "processor's time each"
)
TOO_SLOW = f"{STOPPED}: one rendering took {SECONDS} s of the processor's time"
TOO_MUCH_TOGETHER = (
    f"{STOPPED}: all renderings together wrote more than {PER_RENDERING:,} characters each, and "
    f"{PER_CHARACTER} for each character of the data"
)
STOPS_ALL = ("", (), TOO_SLOW)  # the answer to a chat that takes too long, and to all chats after it
KILLED = f"{STOPPED}: its process was killed, as Linux does when the memory of the machine is full"
HUNG = f"{STOPPED}: its process did nothing for {HANGS} s"
TOO_LARGE = f"the template took more than {MEGABYTES} MB"


@contextlib.contextmanager
def _watched(process: subprocess.Popen[bytes], hung: threading.Event) -> Iterator[None]:
    """Kill the process if it uses no processor time for `HANGS` seconds, and set the event."""
    done = threading.Event()

    def watch() -> None:
        import psutil

        used = -1.0
        with contextlib.suppress(psutil.NoSuchProcess):
            while not done.wait(HANGS):
                before, used = used, sum(psutil.Process(process.pid).cpu_times()[:2])
                if used == before:
                    hung.set()
                    process.kill()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _portions(chats: list[Any]) -> Iterator[list[str]]:
    """Yield chats as JSON, in portions for one request each."""
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
    """An error whose message is shown as it is."""


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, and its end closes stdin
    answers_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints must not mix with the answers
    # `finetune` may not be installed, and -P leaves the working directory out
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    chat_template_utils = _import_upstream()
    _limit_memory()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        of_rows = request["way"] in ("row", "without nulls", "expression")
        answers = _of_rows(request) if of_rows else _answers(request, chat_template_utils)
        answers_to.write(json.dumps(answers).encode() + b"\n")
        answers_to.flush()


def _import_upstream() -> Any:
    """Import only transformers' module of chat templates, because its packages take a second longer.

    The module needs three functions and a logger from these packages. If a version needs more, all of
    transformers is imported.
    """
    found = find_spec("transformers")
    folder = str(Path(found.origin).parent) if found and found.origin else ""
    around: dict[str, dict[str, Any]] = {
        "transformers": {"__path__": [folder]},
        "transformers.utils": {"__path__": [f"{folder}/utils"]},
        "transformers.utils.logging": {"get_logger": logging.getLogger},
        "transformers.utils.import_utils": {
            "is_jinja_available": lambda: True,
            "is_torch_available": lambda: False,
            "is_vision_available": lambda: False,
        },
    }
    for name, content in around.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        return importlib.import_module("transformers.utils.chat_template_utils")
    except (ImportError, AttributeError):
        for name in around:
            del sys.modules[name]
        return importlib.import_module("transformers.utils.chat_template_utils")


def _of_rows(request: dict[str, Any]) -> list[Any]:
    def one(row: dict[str, Any]) -> tuple[str, tuple[()]]:
        with _limited_time():
            renderer, limits = _compiled(request["template"], request["way"])
            limits.left = ITERATIONS
            text = renderer(row)
        _spare(request["template"]).take(text, len(json.dumps(row)))
        return text, ()

    return [_answer(one, row) for row in request["chats"]]


@cache
def _compiled(template: str, way: str) -> tuple[Any, Any]:
    """Return the function that renders a row of an evaluation, and its limits."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = _regex_replace
    environment.finalize = _not_null if way == "without nulls" else None
    limits = _limit_operations(environment)
    if way != "expression":
        return environment.from_string(template).render, limits
    made = environment.compile_expression(template, undefined_to_none=False)

    def value(row: dict[str, Any]) -> str:
        found = made(row)
        if isinstance(found, StrictUndefined):
            str(found)  # raises an error that names the undefined variable
        return json.dumps(found)

    return value, limits


def _not_null(value: object) -> Any:
    if value is None:
        raise _Refused("the template would write a null, as the text None")
    return value


def _regex_replace(text: str, pattern: str, by: str, count: int = 0) -> str:
    return re.sub(pattern, by, text, count=count)


def _limit_operations(environment: Any) -> Any:
    """Make an environment count loops, macros and calls. Return the object that holds the remaining count."""
    from jinja2 import lexer, nodes
    from jinja2.ext import Extension

    class Limits(Extension):
        """Insert a counting statement at the start of each body of a loop, macro or call."""

        tags = {"count_iteration"}  # noqa: RUF012 (Jinja's convention)
        left = ITERATIONS

        def filter_stream(self, stream: TokenStream) -> Iterator[Any]:
            before, statement = "", ""
            for token in stream:
                yield token
                if before == lexer.TOKEN_BLOCK_BEGIN:
                    statement = token.value
                if token.type == lexer.TOKEN_BLOCK_END and statement in ("for", "macro", "call"):
                    yield lexer.Token(token.lineno, lexer.TOKEN_BLOCK_BEGIN, "{%")
                    yield lexer.Token(token.lineno, lexer.TOKEN_NAME, "count_iteration")
                    yield lexer.Token(token.lineno, lexer.TOKEN_BLOCK_END, "%}")
                before = token.type

        def parse(self, parser: Parser) -> Any:
            return nodes.ExprStmt(self.attr("count"), lineno=next(parser.stream).lineno)

        @property
        def count(self) -> None:
            """Count by reading an attribute, because the sandbox makes a call as slow as the loop's body."""
            self.left -= 1
            if self.left < 0:
                raise _Refused(f"the template took more than {ITERATIONS:,} loop iterations")

    environment.intercepted_binops = frozenset(["**"])
    environment.binop_table = {**environment.binop_table, "**": _power}
    environment.add_extension(Limits)
    return environment.extensions[Limits.identifier]


def _power(left: Any, right: Any) -> Any:
    whole = isinstance(left, int) and isinstance(right, int)
    if whole and left.bit_length() * right > LARGEST_POWER:
        raise _Refused(f"the template took more than {LARGEST_POWER:,} bits for a number")
    return left**right


@cache
def _environment(upstream: ModuleType) -> tuple[Any, Any]:
    """Return transformers' environment for chat templates, and the object that counts its loops."""
    from finetune.core import upstream_private

    environment = upstream_private.chat_template_environment(upstream)
    return environment, _limit_operations(environment)


@lru_cache(maxsize=16)
def _chat_template(source: str, upstream: ModuleType) -> tuple[Any, Any]:
    """Return a compiled chat template and its limits.

    Compilation evaluates constants, so it has a time limit.
    """
    environment, limits = _environment(upstream)
    with _limited_time():
        return environment.from_string(source), limits


@dataclass
class _Spare:
    """The limits that the renderings of a template have left, together."""

    iterations: int = ITERATIONS
    seconds: float = ITERATIONS * PER_ITERATION
    """Processor time."""
    characters: int = LONGEST

    def take(self, text: str, given: int) -> None:
        """Check the text that a rendering wrote of a chat or example with `given` characters."""
        if len(text) > LONGEST:
            raise _Refused(f"the template took more than {LONGEST} characters")
        self.characters += PER_RENDERING + PER_CHARACTER * given - len(text)
        if self.characters < 0:
            raise _Refused(TOO_MUCH_TOGETHER)
        text.encode()  # raises for half of a surrogate pair


@lru_cache(maxsize=16)
def _spare(source: str) -> _Spare:
    return _Spare()


def _answers(request: dict[str, Any], upstream: ModuleType) -> list[Any]:
    """Return (text, spans, error) of each chat."""
    from finetune.core import upstream_private

    options, marks = {**request["special"]}, request["way"] == "marks" and not request["prompt"]
    if request["date"]:
        options["strftime_now"] = datetime.datetime.fromisoformat(request["date"]).strftime

    def rendered(
        messages: list[Any], tools: Sequence[dict[str, Any]] | None, prompt: bool = request["prompt"]
    ) -> tuple[str, list[Any]]:
        template, limits = _chat_template(request["template"], upstream)
        pairs, spare = ITERATIONS_PER_PAIR * len(messages) ** 2, _spare(request["template"])
        spare.iterations += ON_AVERAGE + pairs
        spare.seconds += (ON_AVERAGE + pairs) * PER_ITERATION
        limits.left = most = min(spare.iterations, ITERATIONS + pairs)
        if spare.seconds < 0:
            raise _Refused(TOO_LONG_TOGETHER)
        began = time.process_time()
        given = {
            "messages": upstream_private.with_reasoning_fields(upstream, messages),
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **options,
        }
        try:
            with _limited_time():
                text, spans = _with_marks(template, given) if marks else (template.render(given), [])
        except _Refused:
            if limits.left < 0 and most == spare.iterations:
                raise _Refused(TOO_SLOW_TOGETHER) from None
            raise
        finally:
            spare.iterations -= most - limits.left
            spare.seconds -= time.process_time() - began
        spare.take(text, size)
        return text, spans

    size = 0  # characters of the chat

    def one(chat: tuple[Any, Any]) -> tuple[Any, Any]:
        nonlocal size
        size = len(json.dumps(chat))
        _spare(request["template"]).seconds += size * PER_ITERATION
        if request["way"] == "turns" and not request["prompt"]:
            return _by_turns(rendered, *chat, request["after"])
        return rendered(*chat)

    return [_answer(one, chat) for chat in request["chats"]]


def _with_marks(template: Any, given: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return a chat, and the character ranges that the template marks as the assistant's.

    transformers joins all previous pieces at each mark. Joining pieces early makes this faster.
    """
    pieces, spans = list[str](), list[Any]()
    with template.environment.activate_tracker(pieces, spans):
        for piece in template.generate(given):
            pieces.append(piece)
            if len(pieces) > 100:
                pieces[:] = ["".join(pieces)]
    return "".join(pieces), spans


def _answer(one: Callable[[Any], tuple[Any, Any]], chat: object) -> tuple[Any, Any, str]:
    from jinja2 import TemplateSyntaxError

    try:
        return (*one(chat), "")
    except MemoryError:
        error = TOO_LARGE
    except TemplateSyntaxError as broken:
        error = f"the template is not valid: {broken.message} (line {broken.lineno} of the template)"
    except _Refused as refused:
        error = str(refused)
    except Exception as other:  # a template can raise any exception
        error = f"the template raised an error: {other}"
    return "", (), error[:300]


def _by_turns(
    rendered: Callable[..., tuple[str, list[Any]]],
    messages: list[Any],
    tools: Sequence[dict[str, Any]] | None,
    after_turn: str,
) -> tuple[Any, Any]:
    """Find the assistant's turns: each turn is the text that it adds to the text before it.

    Rendering the whole prefix of each turn takes quadratic time. So a later turn is rendered after a few
    messages only: the system message, and the messages from the last user message on. If the added text
    matches the whole chat, the turn is found. Otherwise the whole prefix is rendered.
    """
    text, _ = rendered(messages, tools)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    spans: list[list[int]] = []

    def ends(before: list[Any], turn: int) -> tuple[str, str]:
        """Return the text before a turn, and the text up to its end."""
        prompt, _ = rendered(before, tools, prompt=True)
        whole, _ = rendered([*before, messages[turn]], tools)
        return prompt, whole.removesuffix(after_turn)

    for number, turn in enumerate(turns):
        if number >= EXACT_TURNS:
            with contextlib.suppress(Exception):  # a template may accept all messages but not these few
                last = turns[number - 1]
                context = _context(messages, last)
                known = rendered([*context, messages[last]], tools)[0].removesuffix(after_turn)
                prompt, whole = ends([*context, *messages[last:turn]], turn)
                start, added = spans[-1][1], whole[len(known) :]
                begins = whole.startswith(prompt) and prompt.startswith(known)
                if begins and text.startswith(added, start):
                    spans.append([start + len(prompt) - len(known), start + len(added)])
                    continue
        prompt, whole = ends(messages[:turn], turn)
        if not (whole.startswith(prompt) and text.startswith(whole)):
            raise _Refused("the template neither marks the assistant's tokens nor renders turn by turn")
        spans.append([len(prompt), len(whole)])
    return text, spans


def _context(messages: list[Any], turn: int) -> list[Any]:
    """Return the system message of a chat, and the last user message before a turn."""
    first = messages[:1] if messages[0]["role"] == "system" else []
    last_user_message = next(
        (message for message in reversed(messages[:turn]) if message["role"] == "user"), None
    )
    return [*first, last_user_message] if last_user_message else first


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Let the kernel end the process after SECONDS of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    """Limit the address space to MEGABYTES more than now. Only Linux supports this."""
    import resource

    with (
        contextlib.suppress(OSError, ValueError),
        open("/proc/self/statm") as file,
    ):  # /proc exists only on Linux
        now = int(file.read().split()[0]) * resource.getpagesize()
        limit = now + MEGABYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    _serve()
