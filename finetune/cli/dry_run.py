"""`finetune train --dry-run`: prepare the data and print the plan, without training."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from finetune.checkpointing import resume
from finetune.cli import arguments
from finetune.core import progress
from finetune.core.console import Console, quieten_libraries
from finetune.core.formatting import WARNING
from finetune.data import preview
from finetune.distributed import launch_environment
from finetune.launch import launcher
from finetune.planning import plan_report, planned_machine
from finetune.recipe import adapter_types
from finetune.recipe.schema import Recipe


def run(options: argparse.Namespace, recipe: Recipe, notes: list[str]) -> dict[str, Any]:
    """Print the data, the plan on this machine, and the checkpoint that training would resume from.

    Raises:
        UserError: the launch, the run folder, a checkpoint, the data or a training setting is wrong. `train`
            raises the same errors before it loads weights.
    """
    screen, where = Console(quiet=options.quiet), recipe.train.output_dir
    if resume.check_folder(where, options.resume, recipe.model_dump(mode="json")):
        screen.say(f"{where} is finished: nothing to do")
        return {"run": where, "finished": True}
    if not options.accelerate:
        launch_environment.check_launcher()
    elif not launcher.launched():
        config = launcher.find(options.accelerate)
        launcher.check(config)
        launcher.check_count(config, [], arguments.train_again(options))
    quieten_libraries()
    from finetune.training import start_checks

    notes = [*recipe.origin.notices, *notes, *adapter_types.advice(recipe)]
    screen.note(*(note for note in notes if not note.startswith(WARNING)))  # the plan prints warnings
    with progress.phase(screen, "preparing the data"):
        start = start_checks.check_start(recipe, options.resume, launches=bool(options.accelerate))
    preview.summary(screen, start.prepared)
    request = planned_machine.PlanRequest(None, None, None, options.accelerate)
    planned = plan_report.run(recipe, options.overrides, screen, request)
    launched = ["--accelerate", options.accelerate] if options.accelerate else []
    again = shlex.join(launcher.command_line([*arguments.train_again(options), *launched]))
    then = f"it would resume after step {start.checkpoint.step}; " if start.checkpoint else ""
    if start.unseen:
        screen.say(f"note: {', '.join(start.unseen)}: looked at when the launch's processes train")
    screen.say("", f"dry run: nothing was trained; {then}next: {again}")
    reports = {name: report.as_json() for name, report in start.prepared.report.items()}
    return {"plan": plan_report.as_json(*planned), "data": reports, "next": again}
