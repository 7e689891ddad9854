"""`finetune evaluate`: compare the base model with the fine-tuned model."""

from __future__ import annotations

import argparse
import functools
import json
import os
from typing import TYPE_CHECKING, Any

from finetune import arguments
from finetune.given import opened

if TYPE_CHECKING:
    from finetune.launch import Start
    from finetune.run_folder import RunFolder

EVALUATE: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--tasks",
        {"metavar": "TASK", "nargs": "+", "help": "in place of eval.tasks: names of lm-eval's, or files"},
    ),
)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate base and tuned of a run: held-out rows, a general text, tasks of lm-eval or of your own."""
    from finetune import launch
    from finetune.screen import Screen, quieten_libraries

    if options.tasks is not None:  # `--tasks a,b c eval.limit=8`
        tasks = [part for text in options.tasks if "=" not in text for part in text.split(",")]
        options.overrides += [text for text in options.tasks if "=" in text]
        options.overrides.append(f"eval.tasks={json.dumps(tasks)}")
    run = opened(options)
    again = ["evaluate", str(run.path), *options.overrides, *arguments.flags(options)]
    launch.if_needed(again, functools.partial(processes_of, run, options.overrides))
    quieten_libraries()
    from finetune import evaluate as finetune_evaluate
    from finetune import report, summary
    from finetune.scoring import memory_errors

    screen = Screen(quiet=options.quiet)
    with memory_errors():
        result = finetune_evaluate.run(run.path, options.overrides, screen=screen)
    if os.environ.get("RANK", "0") == "0":
        summary.show_scores(screen, result)
        report.after(run.path, screen)


def processes_of(run: RunFolder, overrides: list[str], machine: Any) -> Start:
    """How a run is evaluated on several GPUs; called where there are several."""
    from finetune import evaluation_reopen

    return evaluation_reopen.launch_of(run, overrides, machine)
