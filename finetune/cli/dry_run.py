"""`finetune train --dry-run`: what would be done, with the data read and encoded; nothing is trained."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.autoconfig.batch_size import count_steps, split_batch
from finetune.checkpointing import resume, resume_contract
from finetune.cli import arguments
from finetune.core import progress
from finetune.core.console import Console, quieten_libraries
from finetune.core.formatting import WARNING, labelled
from finetune.data import preview
from finetune.launch import launcher
from finetune.planning import plan_report
from finetune.preflight import choice_checks, token_checks
from finetune.run_folder.run_folder import RunFolder
from finetune.training import load_data, optimizers

if TYPE_CHECKING:
    import argparse

    from finetune.recipe.schema import Recipe


def run(options: argparse.Namespace, recipe: Recipe, notes: list[str]) -> dict[str, Any]:
    """Its data, its plan on this machine, and what it would go on from.

    Raises:
        UserError: what `train` refuses before it loads a weight: a launch, a folder, a checkpoint, rows,
            what SFTConfig or the schedule is given.
    """
    screen, where = Console(quiet=options.quiet), recipe.train.output_dir
    if resume.nothing_to_do(where, options.resume, recipe.model_dump(mode="json")):
        screen.say(f"{where} is finished: nothing to do")
        return {"run": where, "finished": True}
    if options.accelerate and not launcher.launched():
        config = launcher.find(options.accelerate)
        launcher.check(config)
        launcher.check_count(config, [], arguments.train_again(options))
    quieten_libraries()
    from finetune.evaluation import lm_eval_harness, tasks
    from finetune.training import resume_facts, stopping, training_arguments

    setup = choice_checks.setup_of(recipe)
    found = resume.find(RunFolder(Path(where)), options.resume) if where else None
    screen.say(*(labelled(note) for note in notes if not note.startswith(WARNING)))  # which the plan prints
    batch = split_batch(recipe.train, setup.launch.rows_apart)
    alone = setup.launch.processes == 1  # else SFTConfig would wait for processes that have ended
    made = training_arguments.training_arguments(recipe.train, recipe.data, setup, batch) if alone else None
    tasks.check_metric(recipe.eval, lm_eval_harness.check(recipe.eval, recipe.model))
    with progress.phase(screen, "preparing the data"):
        tokenizer, prepared = load_data.prepare_data(recipe)
    token_checks.check_texts(recipe, tokenizer)
    preview.summary(screen, prepared)
    rows = None if recipe.data.streaming else len(prepared.train)
    steps = count_steps(recipe.train, rows, batch, setup.launch.rows_apart)
    if made:
        optimizers.check_schedule(made, steps)
    if here := made if not options.accelerate else None:  # its processes hold other state
        stopping.check(recipe.train, options.resume, setup.launch.keeper)
        length = resume_facts.RunLength(batch, steps)
        contract = resume_facts.contract_of(recipe, setup, length, tokenizer, prepared, here)
        if found:
            resume_contract.compare(found.contract, contract, found.path)
    asked = plan_report.Asked(None, None, None, options.accelerate)
    planned = plan_report.run(recipe, options.overrides, screen, asked)
    launched = ["--accelerate", options.accelerate] if options.accelerate else []
    again = shlex.join(launcher.command_line([*arguments.train_again(options), *launched]))
    then = f"it would go on after step {found.step}; " if found else ""
    unseen = ["SFTConfig", "the schedule"] * (not alone) + ["the checkpoint"] * bool(found and not here)
    if unseen:
        screen.say(f"note: {', '.join(unseen)}: looked at when the launch's processes train")
    screen.say("", f"dry run: nothing was trained; {then}next: {again}")
    reports = {name: report.as_json() for name, report in prepared.report.items()}
    return {"plan": plan_report.as_json(*planned), "data": reports, "next": again}
