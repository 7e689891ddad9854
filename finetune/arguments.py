"""Values on the command line, and what goes with what there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import Problem, UserError

if TYPE_CHECKING:
    import argparse


def count(text: str) -> int:
    """A number of rows, 0 or more."""
    if (number := int(text)) < 0:
        raise ValueError
    return number


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def at_least_zero(text: str) -> float:
    if not 0 <= (number := float(text)) < float("inf"):
        raise ValueError
    return number


def seconds(text: str) -> float:
    """A time: 90s, 30m, 2h or 1h30m."""
    found = re.fullmatch(r"(?:([\d.]+)h)?(?:([\d.]+)m)?(?:([\d.]+)s)?", text.strip())
    parts = [float(part or 0) for part in found.groups()] if found and text else [0.0, 0.0, 0.0]
    if not sum(parts):
        raise ValueError
    return parts[0] * 3600 + parts[1] * 60 + parts[2]


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


COMPARE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("what", {"metavar": "RECIPE | RUN_A", "help": "a recipe file, or a run folder"}),
    ("overrides", {"metavar": "key=value | RUN_B", "nargs": "*", "help": "or the other run folder"}),
    (
        "--adapters",
        {"metavar": "TYPES", "help": "such as lora,dora,ia3; ia3@0.1 has a learning rate of its own"},
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
