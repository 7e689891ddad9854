"""Parse the values of command-line arguments, and check which of them go together."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.core.argument_types import MOST_GPUS
from finetune.core.errors import Stopped
from finetune.core.visible_text import visible
from finetune.distributed import launch_environment
from finetune.recipe import command_line_overrides
from finetune.training.stop_condition import Until

MOST = 10**12  # a larger number is a mistake, and Python may not convert it to a float
MOST_SEEDS = 1000  # of each adapter type in `compare`
# Functions with another name than their command: `import` is a keyword, and `finetune.export` is a package.
NAMES = {"import_recipe": "import", "export_model": "export"}


def command_name(function: Callable[..., Any]) -> str:
    """Return the name of the command that a function runs."""
    own: str = function.__name__
    return NAMES.get(own, own)


def count(text: str) -> int:
    """Parse a number of examples, at least 0."""
    return _number(int, text, 0, "an integer from 0")


def at_least_one(text: str) -> int:
    return _number(int, text, 1, "an integer from 1")


def number_of_gpus(text: str) -> int:
    return _up_to(MOST_GPUS, text)


def number_of_seeds(text: str) -> int:
    return _up_to(MOST_SEEDS, text)


def _up_to(most: int, text: str) -> int:
    number = at_least_one(text)
    if number > most:
        raise wrong(text[:20], f"an integer from 1 to {most:,}")
    return number


def at_least_zero(text: str) -> float:
    return _number(float, text, 0, "a number from 0 up")


def _number(kind: type[int] | type[float], text: str, least: int, expected: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number <= MOST:
        raise wrong(text[:20], f"a number up to {MOST:,}" if number > MOST else expected)
    return number


def wrong(text: str, expected: str) -> argparse.ArgumentTypeError:
    """Return the error of a value. For a ValueError, argparse would print the name of the function."""
    return argparse.ArgumentTypeError(f"{text!r}, expected {expected}")


def seconds(text: str) -> float:
    """Parse a duration such as 90s, 30m, 2h or 1h30m, and return seconds."""
    number = r"(\d+\.?\d*|\.\d+)"
    found = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip())
    parts = [float(part or 0) for part in found.groups()] if found and text else [0.0, 0.0, 0.0]
    if not sum(parts):
        raise wrong(text, "a time: 90s, 30m, 2h or 1h30m")
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def names(text: str) -> str:
    """Parse a list of names. `lora, dora` becomes `lora,dora`."""
    return ",".join(name.strip() for name in text.split(","))


def resume(text: str) -> str:
    """Parse the value of `--resume`: auto, or the name of a checkpoint."""
    if text not in ("auto", "newest") and not re.fullmatch(r"step-\d+", text):
        raise wrong(text, "auto, or a checkpoint's name: step-100")
    return text


def in_order(words: list[str]) -> list[str]:
    """Reorder a command line for argparse.

    `--resume` may have no value, but argparse would take the next word as its value. In `--tasks a b RUN` it
    would take RUN as a task.
    """
    words = ["--resume=newest" if word == "--resume" else word for word in words]
    if words[:1] != ["evaluate"] or "--tasks" not in words:
        return words
    start = words.index("--tasks") + 1
    end = next((at for at in range(start, len(words)) if words[at].startswith("-")), len(words))
    named = [at for at in range(start, end) if "=" not in words[at]]
    others = [word for word in words[1 : start - 1] + words[end:] if "=" not in word and word[:1] != "-"]
    if len(named) > 1 and not others and _is_a_run(words[named[-1]]):
        words.insert(1, words.pop(named[-1]))
    return words


def _is_a_run(word: str) -> bool:
    """Return whether a word names a run and not a task.

    Tasks of lm-eval have names without a slash, and the user's own tasks are YAML files.
    """
    return Path(word).is_dir() or (not word.endswith((".yaml", ".yml")) and ("/" in word or "@" in word))


def train_again(options: argparse.Namespace) -> list[str]:
    """Return the command line of `train` for the processes of its launch."""
    more = [f"--resume={options.resume}"] if options.resume not in (None, "newest") else []
    more += ["--resume"] if options.resume == "newest" else []
    more += [f"--until={options.until.text}"] if options.until else []
    return ["train", options.recipe, *options.overrides, *more]


def go_on(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the command line that resumes a stopped run. Without a checkpoint, it starts from the beginning.

    If the run has saved its weights but has no checkpoint, return the command that evaluates it.
    """
    named = [text.partition("=")[2] for text in options.overrides if text.startswith("train.output_dir=")]
    where = [] if named or not folder else [command_line_overrides.of_path("train.output_dir", folder)]
    folder = folder or "".join(named[-1:])
    config = options.accelerate or os.environ.get(
        launch_environment.ACCELERATE
    )  # the processes of a launch do not get the option
    launched = ["--accelerate", config] if config else []
    saved = any((Path(folder) / "checkpoints").glob("step-*")) if folder else False
    if folder and not saved and any((Path(folder) / name).exists() for name in ("adapter", "model")):
        return ["evaluate", folder]
    known = folder or options.resume  # otherwise there is no folder to resume from
    resumes = ["--resume" if saved else "--resume=auto"] if known else []
    return ["train", options.recipe, *options.overrides, *where, *launched, *resumes]


def with_command(stopped: Stopped, options: argparse.Namespace) -> Stopped:
    """Return the message of a stopped run with the command that resumes it."""
    from finetune.launch import launcher

    again = shlex.join(launcher.command_line(go_on(options, stopped.folder)))
    return Stopped(f"{visible(stopped)}\n  resume with: {visible(again)}")


# Arguments that several commands take
RECIPE = (
    "recipe",
    {"metavar": "RECIPE", "help": "a recipe file, or the name of a shipped recipe such as quickstart"},
)
MAYBE_RECIPE = ("recipe", {**RECIPE[1], "nargs": "?"})
RUN = ("run", {"metavar": "RUN", "help": "a run folder, or organization/name@revision on the Hub"})
OVERRIDES = (
    "overrides",
    {"metavar": "key=value", "nargs": "*", "help": "recipe keys to override, such as adapter.type=ia3"},
)
OF_RUN = (
    "overrides",
    {
        **OVERRIDES[1],
        "help": "recipe keys to override, such as model.name=FOLDER if the base model has moved",
    },
)


def flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of every command that were set."""
    return [f"--{flag}" for flag in ("quiet", "debug", "json", "verbose") if getattr(options, flag, False)]


def until(text: str) -> Until:
    """Parse the value of `--until`: a step, a duration, a time of day, or a date and time.

    Examples are 500, 7h30m, 06:30 and 2026-11-22T06:30.
    """
    try:
        return _until(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise wrong(text, "a step (500), or a time: 7h30m, 06:30, 2026-11-22T06:30") from None


def _until(text: str) -> Until:
    if text.isdigit():
        return Until(text, step=at_least_one(text))
    if re.fullmatch(r"\d\d:\d\d", text):
        now = datetime.datetime.now()
        hour, minute = map(int, text.split(":"))
        at = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
        return Until(text, time=(at if at > now else at + datetime.timedelta(days=1)).timestamp())
    if "-" in text:
        return Until(text, time=datetime.datetime.fromisoformat(text).timestamp())
    return Until(text, deadline=time.monotonic() + seconds(text))
