"""Values on the command line, and what goes with what there."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from finetune.errors import Problem, UserError

ACCELERATE = "FINETUNE_ACCELERATE"  # of the environment: the config that this launch was asked for by


def count(text: str) -> int:
    """A number of rows, 0 or more."""
    return _number(int, text, 0, "a whole number from 0 up")


def at_least_one(text: str) -> int:
    return _number(int, text, 1, "a whole number from 1 up")


def at_least_zero(text: str) -> float:
    return _number(float, text, 0, "a number from 0 up")


def _number(kind: Any, text: str, least: int, expected: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        raise wrong(text, expected)
    return number


def wrong(text: str, expected: str) -> argparse.ArgumentTypeError:
    """What argparse says of a value; of a ValueError it would name our function."""
    return argparse.ArgumentTypeError(f"{text!r}, expected {expected}")


def seconds(text: str) -> float:
    """A time: 90s, 30m, 2h or 1h30m."""
    number = r"(\d+\.?\d*|\.\d+)"
    found = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text.strip())
    parts = [float(part or 0) for part in found.groups()] if found and text else [0.0, 0.0, 0.0]
    if not sum(parts):
        raise wrong(text, "a time: 90s, 30m, 2h or 1h30m")
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


def names(text: str) -> str:
    """A list of names; `lora, dora` is lora,dora."""
    return ",".join(name.strip() for name in text.split(","))


class Until(NamedTuple):
    """When a run ends before its last step, with a checkpoint."""

    text: str
    step: int | None = None
    time: float | None = None
    """Seconds since 1970."""


def until(text: str) -> Until:
    """A step (500), a time from now (7h30m), the next 06:30, or a date and time (2026-11-22T06:30)."""
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
    return Until(text, time=time.time() + seconds(text))


def resume(text: str) -> str:
    """What follows `--resume=`: auto, or a checkpoint's name."""
    if text not in ("auto", "newest") and not re.fullmatch(r"step-\d+", text):
        raise wrong(text, "auto, or a checkpoint's name: step-100")
    return text


def in_order(words: list[str]) -> list[str]:
    """A command line as argparse reads what is meant: `--resume` may have no value, and would take what
    follows for one; `--tasks a b RUN` would take RUN for a task."""
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
    """Whether it is no task: those of lm-eval have names without a slash, one of your own is a YAML file."""
    return Path(word).is_dir() or (not word.endswith((".yaml", ".yml")) and ("/" in word or "@" in word))


def check_read(command: str, overrides: list[str]) -> None:
    """Refuse overrides of what a command on a finished run does not read (exit 2)."""
    read = ("model", "data", "speed", "eval") if command != "publish" else ("publish", "model", "data")
    other = [
        text for text in overrides if text.partition(".")[0] in {"train", "adapter", "publish"} - {*read}
    ]
    what = f"{command} does not read it: the run is as it was trained"
    texts = {"expected": f"keys of {', '.join(read)}", "fix": "drop it, or train again with it"}
    if other:
        raise UserError(
            *(Problem(what, text.partition("=")[0], f"override {text!r}", **texts) for text in other)
        )
    key = "data.chat_template"
    if command != "publish" and any(text.partition("=")[0] == key for text in overrides):
        what = f"{command} does not read it: the run's template is saved with its tokenizer"
        raise UserError(Problem(what, key, fix="drop it, or train again with it"))


def second_run(options: argparse.Namespace) -> str:
    """The second of two run folders."""
    given = {"--adapters": options.adapters, "--seeds": options.seeds, "--budget": options.budget}
    given["--output"] = options.output
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        what = f"{', '.join(wrong)}: for a recipe, and this is a folder"
        raise UserError(Problem(what, where=options.what, fix="finetune compare RECIPE --adapters lora,dora"))
    if len(options.overrides) != 1 or "=" in options.overrides[0]:
        found = " ".join(options.overrides) or "nothing beside it"
        raise UserError(
            Problem(
                "one run folder is compared with another", found=found, fix="finetune compare RUN_A RUN_B"
            )
        )
    return options.overrides[0]


def compare_problems(options: argparse.Namespace) -> list[Problem]:
    """What does not go with a recipe."""
    problems = []
    if options.adapters is None and Path(options.what).exists():
        problems.append(Problem("say which adapter types", fix="--adapters lora,dora,ia3"))
    if options.assert_equal:
        fix = "finetune compare RUN_A RUN_B --assert-equal"
        problems.append(Problem("--assert-equal is for two run folders", fix=fix))
    return problems


def compare_again(options: argparse.Namespace) -> list[str]:
    """The command line again, for the processes that it is launched in."""
    named = [(f"--{name}", getattr(options, name)) for name in ("adapters", "seeds", "output")]
    named.append(("--budget", f"{options.budget}s" if options.budget else None))
    flat = [text for name, value in named if value is not None for text in (name, str(value))]
    return [options.what, *options.overrides, *flat]


def train_again(options: argparse.Namespace) -> list[str]:
    """The command line of `train` again, for the processes that it is launched in."""
    more = [f"--resume={options.resume}"] if options.resume not in (None, "newest") else []
    more += ["--resume"] if options.resume == "newest" else []
    more += [f"--until={options.until.text}"] if options.until else []
    return ["train", options.recipe, *options.overrides, *more]


def go_on(options: argparse.Namespace, folder: str) -> list[str]:
    """The command line that goes on with a run that was stopped; from its beginning if it got no further.

    One that has saved what it trained, and has no checkpoint, would be trained again: it is evaluated.
    """
    named = [text.partition("=")[2] for text in options.overrides if text.startswith("train.output_dir=")]
    where = [] if named or not folder else [f"train.output_dir={folder}"]
    folder = folder or "".join(named[-1:])
    config = options.accelerate or os.environ.get(ACCELERATE)  # which a launch's processes are not given
    launched = ["--accelerate", config] if config else []
    saved = any((Path(folder) / "checkpoints").glob("step-*")) if folder else False
    if folder and not saved and any((Path(folder) / name).exists() for name in ("adapter", "model")):
        return ["evaluate", folder]
    known = folder or options.resume  # else there is no folder that could be gone on with
    resumes = ["--resume" if saved else "--resume=auto"] if known else []
    return ["train", options.recipe, *options.overrides, *where, *launched, *resumes]


TRAIN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--accelerate", {"metavar": "FILE", "help": "an accelerate config to launch with"}),
    (
        "--resume",
        {
            "metavar": "[=auto]",
            "type": resume,
            "help": "go on from the newest checkpoint in train.output_dir; =step-N: from that one; =auto: or"
            " start if there is none, and do nothing if the run is finished",
        },
    ),
    (
        "--until",
        {
            "metavar": "WHEN",
            "type": until,
            "help": "save and leave (exit 75) before then: 7h30m, 06:30, 2026-11-22T06:30; or a step: 500",
        },
    ),
    ("--dry-run", {"action": "store_true", "help": "read the data, plan the run, and train nothing"}),
)
DATA: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--show", {"metavar": "N", "type": count, "help": "rows to show: 3; with --html 20"}),
    ("--html", {"metavar": "FILE", "help": "write a page with the audit, plots and rows"}),
    ("--prepare", {"metavar": "DIR", "help": "keep the prepared data there: data.cache=DIR"}),
)
EVALUATE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--tasks",
        {"metavar": "TASK", "nargs": "+", "help": "in place of eval.tasks: names of lm-eval's, or files"},
    ),
)
RECIPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("name", {"metavar": "NAME", "nargs": "?"}),
    ("--copy", {"metavar": "TO", "help": "folder to copy it to, with the files it needs"}),
)
PUBLISH: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--dry-run", {"action": "store_true", "help": "show what would go up; asks no one"}),
    ("--merged", {"action": "store_true", "help": "what `finetune merge` left, in place of the adapter"}),
    ("--repo", {"metavar": "ID", "help": "organisation/name: publish.repo"}),
    ("--public", {"action": "store_true", "help": "publish.private=false"}),
)
CHECK: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--prove-resume",
        {
            "action": "store_true",
            "help": "train a few steps, stop, resume, and compare bit for bit: a minute",
        },
    ),
    (
        "--preflight",
        {
            "action": "store_true",
            "help": "a run's whole life in three steps: kill, resume, evaluate, publish",
        },
    ),
)
COMPARE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("what", {"metavar": "RECIPE | RUN_A", "help": "a recipe file, or a run folder"}),
    (
        "overrides",
        {"metavar": "key=value | RUN_B", "nargs": "*", "help": "or the other run folder"},
    ),
    (
        "--adapters",
        {
            "metavar": "TYPES",
            "type": names,
            "help": "such as lora,dora,ia3; ia3@0.1 has a learning rate of its own",
        },
    ),
    ("--seeds", {"metavar": "N", "type": at_least_one, "help": "runs of each type: 3"}),
    (
        "--budget",
        {"metavar": "TIME", "type": seconds, "help": "for all runs: 30m, 2h, shared evenly"},
    ),
    ("--output", {"metavar": "DIR", "help": "runs/compare-RECIPE; started again, it goes on there"}),
    ("--assert-equal", {"action": "store_true", "help": "exit 4 unless both runs learnt the same"}),
)
CHAT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--prompt", {"metavar": "TEXT", "help": "ask this, and end"}),
    (
        "--max-new-tokens",
        {"metavar": "N", "type": at_least_one, "default": 512, "help": "longest answer: 512"},
    ),
    (
        "--temperature",
        {"metavar": "T", "type": at_least_zero, "default": 0.0, "help": "0, which is greedy"},
    ),
)
MERGE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--dtype",
        {"choices": ["bfloat16", "float32"], "default": "bfloat16", "help": "of the saved weights"},
    ),
    ("--quantize", {"choices": ["int8", "int4", "fp8"], "help": "weights of linear layers, by torchao"}),
    ("--output", {"metavar": "DIR", "help": "a new folder: RUN/merged, RUN/merged-int8 ..."}),
)
PLAN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--gpu", {"metavar": "NAME", "help": "such as h100-80gb; without it what is here"}),
    ("--gpus", {"metavar": "N", "type": at_least_one, "help": "GPUs: 1, or all that are here"}),
    (
        "--accelerate",
        {"metavar": "FILE", "help": "an accelerate config; without it the one train would take"},
    ),
    ("--price-per-hour", {"metavar": "X", "type": at_least_zero, "help": "of one GPU, in any currency"}),
)
MEASURE: tuple[str, dict[str, Any]] = (
    "--measure",
    {"action": "store_true", "help": "time products, attention and copies here, for `finetune plan`"},
)
TRACED: tuple[str, dict[str, Any]] = (
    "--output",
    {"metavar": "DIR", "help": "for the trace: runs/profile-RECIPE"},
)
TUNE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--space", {"metavar": "FILE", "help": "what is searched: the shipped recipes/tune.yaml"}),
    ("--trials", {"metavar": "N", "type": at_least_one, "help": "in all, over restarts and workers: 20"}),
    (
        "--hours",
        {"metavar": "H", "type": at_least_zero, "help": "of this command: no trial goes on after it"},
    ),
    (
        "--storage",
        {
            "metavar": "URL",
            "help": "for several workers: postgresql://user@host/database, mysql+pymysql://..., journal:FILE;"
            " $FINETUNE_STORAGE, which shows no password; else a file in the study's folder",
        },
    ),
    ("--output", {"metavar": "DIR", "help": "runs/tune-RECIPE; its name is the study's"}),
    ("--accelerate", {"metavar": "FILE", "help": "an accelerate config to launch trials with"}),
    ("--final", {"action": "store_true", "help": "then train the best recipe, whole, into DIR/final"}),
    ("--export-wandb", {"metavar": "FILE", "help": "write the space as a W&B sweep, and end"}),
)
ABLATE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--ladder", {"metavar": "FILE", "help": "the rungs: recipes/ladder.yaml"}),
    (
        "--output",
        {"metavar": "DIR", "default": "results", "help": "results; started again, it goes on there"},
    ),
)
