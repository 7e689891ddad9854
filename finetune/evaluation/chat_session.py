"""Chat with the base model and the fine-tuned model side by side in the terminal: `finetune chat RUN`.

Prompts use the chat template that is saved with the tokenizer, as in training and evaluation. If the run was
trained on plain text, the prompt is only the text that you type. Each model has its own history.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.core import progress
from finetune.core.console import Console as Screen
from finetune.core.errors import Exit, Problem, UserError
from finetune.core.privacy import masked
from finetune.core.visible_text import visible, visible_lines
from finetune.data import encoding
from finetune.data.encoding import Encoder
from finetune.data.examples import Example
from finetune.evaluation import reopen, scoring
from finetune.models import base_identity, token_limits
from finetune.run_folder import run_folder

MAX_NEW_TOKENS = 512
SHOWN = {"base": "base", "tuned": "fine-tuned"}  # name of a model -> shown name
HELP = "/reset: new conversation  /system TEXT  /base, /tuned, /both: who answers  /quit"
# Chat can need more memory than training: for a separate base model or a long conversation
LESS_MEMORY = "add --max-new-tokens=128, or set ACCELERATE_USE_CPU=true to use the CPU"
# Speakers in training data that consists of chats (`data_report.json`)
CHATS = {"assistant", "every role"}


@dataclass
class Voice:
    """One of the two models, with its conversation so far."""

    name: str
    weights: Any
    off: bool = False
    """Disable the adapter, so that the fine-tuned model acts as the base model."""
    history: list[dict[str, str]] = field(default_factory=list)

    def adapter(self) -> contextlib.AbstractContextManager[Any]:
        return self.weights.disable_adapter() if self.off else contextlib.nullcontext()


@dataclass
class Talk:
    """The two models and the settings for prompts and answers."""

    voices: list[Voice]
    encoder: Encoder
    chats: bool
    """Whether the run was trained on chats. Otherwise the typed text is the whole prompt."""
    max_new_tokens: int
    temperature: float
    console: Console
    asked: tuple[str, ...] = ("base", "tuned")
    """Names of the models that answer."""
    system: str = ""


def run(
    path: str | Path,
    console: Console,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    prompt: str | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
) -> dict[str, str]:
    """Answer `prompt`, or each line that is typed or piped in.

    Returns:
        The answers to `prompt` by the name of the model, `base` or `tuned`; empty in a conversation.

    Args:
        overrides: overrides of the run's recipe, such as `model.name=...` if the base model has another path.

    Raises:
        UserError: the run is not finished (exit 2), or there is not enough memory (exit 3).
    """
    folder = run_folder.open_run(path)
    recipe = run_folder.recipe_of(folder, overrides, files=False)
    speakers = folder.read("data_report.json")["train"]["trained_by"]
    chats = bool(CHATS & set(speakers))
    with scoring.memory_errors(LESS_MEMORY, Exit.ENVIRONMENT):
        with progress.phase(Screen(), "loading the model"):
            tuned: Any = reopen.reopen(folder, recipe)
            stands = reopen.base_stands(tuned)
            base = tuned if stands else reopen.open_base(recipe)
        tokenizer = reopen.tokenizer_of(folder)
        encoder = encoding.make_encoder(tokenizer, recipe.data, chats)
        voices = [Voice("base", base, off=stands), Voice("tuned", tuned)]
        talk = Talk(voices, encoder, chats, max_new_tokens, temperature, console)
        for note in (*reopen.notes(recipe, tokenizer), *base_identity.notes(recipe.model, folder)):
            console.print(visible(masked(f"note: {note}")), markup=False, emoji=False)
        if prompt is not None:
            return answer(talk, prompt)
        if sys.stdin.isatty():
            drawn = "greedy search" if not temperature else f"sampling at temperature {temperature:g}"
            who = visible(masked(f"base model: {recipe.model.name}; fine-tuned model: {folder.path}"))
            console.print(f"{who}; answers use {drawn}", markup=False, emoji=False)
            if not chats:
                console.print("note: the run was trained on plain text. Each line is a prompt of its own")
            console.print(HELP, style="dim", markup=False)
        for line in lines():
            if line in ("/quit", "/exit"):
                break
            if line and (said := reply(talk, line)):
                console.print(visible_lines(said), markup=False, emoji=False, soft_wrap=True)
    return {}


def lines() -> Iterator[str]:
    """Yield typed or piped lines. Ctrl-C and Ctrl-D at the prompt end the iteration."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (arrow keys in `input`)
    while True:
        try:
            yield input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return


def reply(talk: Talk, line: str) -> str:
    """Handle a line, and return the remaining text to print. An error does not end the chat."""
    try:
        if line.startswith("/"):
            return command(talk, line)
        answer(talk, line)
    except KeyboardInterrupt:
        return "stopped; the conversation does not keep this answer"
    except UserError as error:
        return str(error)
    return ""


def command(talk: Talk, line: str) -> str:
    """Handle a line that starts with a slash, and return the text to print."""
    name, _, text = line.partition(" ")
    if name == "/reset":
        for voice in talk.voices:
            voice.history.clear()
        return "the conversation is empty again"
    if name in ("/base", "/tuned", "/both"):
        talk.asked = ("base", "tuned") if name == "/both" else (name[1:],)
        return f"{' and '.join(SHOWN[name] for name in talk.asked)} will answer"
    if name == "/system":
        if not talk.chats or "system" in talk.encoder.leaves_out:
            return "this model does not support a system message"
        talk.system = text.strip()
        return f"system message: {talk.system}" if talk.system else "no system message"
    return HELP


def answer(talk: Talk, text: str) -> dict[str, str]:
    """Let each selected model answer, and print the answers while they are generated.

    Raises:
        UserError: see `respond`, or the text is not UTF-8 (exit 2). Nothing is added to the history.
    """
    _check_text(talk.system + text)
    voices = [voice for voice in talk.voices if voice.name in talk.asked]
    said = {voice.name: "" for voice in voices}
    user_turn = {"role": "user", "content": text}
    given = [{"role": "system", "content": talk.system}] if talk.system else []
    live = Live(console=talk.console, refresh_per_second=8) if talk.console.is_terminal else None
    with live or contextlib.nullcontext():
        for voice in voices:

            def heard(so_far: str, name: str = voice.name) -> None:
                said[name] = so_far
                if live:
                    live.update(side_by_side(said))

            said[voice.name] = respond(talk, voice, [*given, *voice.history, user_turn], heard)
            if not live:
                talk.console.print(
                    f"{SHOWN[voice.name]}: {visible_lines(said[voice.name])}",
                    markup=False,
                    emoji=False,
                    soft_wrap=True,
                )
    for voice in voices:
        voice.history += [user_turn, {"role": "assistant", "content": said[voice.name]}]
    return said


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            Problem(
                "the text is not UTF-8",
                found=repr(text[error.start : error.end])[:200],
                fix="set the terminal to UTF-8, or convert the text: iconv -f WINDOWS-1252 -t UTF-8",
                code="command-line",
            )
        ) from None


def respond(talk: Talk, voice: Voice, messages: list[dict[str, str]], heard: Callable[[str], None]) -> str:
    """Generate one model's answer to messages that end with the user's.

    Args:
        heard: called with the text so far after each token.

    Raises:
        UserError: the template cannot render the messages, or they leave no room for an answer (exit 2).
    """
    tokenizer = talk.encoder.tokenizer
    row = Example("the conversation", [*messages, {"role": "assistant", "content": ""}])
    row = row if talk.chats else Example("the prompt", prompt=messages[-1]["content"])
    (ids,) = talk.encoder.prompts([row])
    if not ids:
        raise UserError(
            Problem(
                "the prompt has no token",
                found=repr(messages[-1]["content"]),
                fix="type a prompt",
                why="this tokenizer adds no token at the beginning, so the model has nothing to continue",
                code="value-type",
            )
        )
    longest = token_limits.positions(voice.weights.config)
    if longest and len(ids) >= longest:
        raise UserError(
            Problem(
                f"the {'conversation' if voice.history else 'prompt'} is too long for the model",
                found=f"{len(ids):,} tokens",
                expected=f"fewer than {longest:,} tokens",
                fix="type /reset to start a new conversation" if voice.history else "type a shorter prompt",
                code="token-limit",
            )
        )
    drawn = {"do_sample": True, "temperature": talk.temperature} if talk.temperature else {"do_sample": False}
    stops = scoring.stop_ids(voice.weights, tokenizer)
    config = GenerationConfig(
        **drawn,
        max_new_tokens=min(talk.max_new_tokens, longest - len(ids)) if longest else talk.max_new_tokens,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
    )
    listener = Listener(tokenizer, heard, stops)
    prompt = torch.tensor([ids], device=voice.weights.device)
    with voice.adapter(), scoring.inference(voice.weights):
        scoring.run_generate(voice.weights, config, prompt, streamer=listener)
    return listener.text


class Listener:
    """A transformers streamer that receives each new token from `generate`."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, heard: Callable[[str], None], stops: Collection[int]
    ) -> None:
        self.tokenizer, self.heard, self.stops = tokenizer, heard, stops
        self.ids: list[int] | None = None  # the first call passes the prompt

    @property
    def text(self) -> str:
        return scoring.answer_text(self.tokenizer, self.ids or [], self.stops).strip()

    def put(self, tokens: torch.Tensor) -> None:
        if self.ids is None:
            self.ids = []
        else:
            self.ids += tokens.flatten().tolist()
            self.heard(self.text)

    def end(self) -> None:
        """Do nothing at the end of the answer."""


def side_by_side(said: dict[str, str]) -> Table:
    """Return a table with one column for each model."""
    table = Table(box=None, expand=True, pad_edge=False)
    for name in said:
        table.add_column(SHOWN[name], ratio=1, overflow="fold", header_style="bold")
    table.add_row(*(Text(visible_lines(text)) for text in said.values()))
    return table
