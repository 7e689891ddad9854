"""A training run, from the recipe to the evaluated adapter.

`cli/train.py` loads the recipe, checks it and starts the launcher. `run` then does, in this order:

1. take the lock of the run folder and listen to signals
2. choose attention, precision and quantization for this machine (`preflight/choice_checks.py`)
3. prepare the data, one process first (`training_data.py`)
4. load the base model and attach the adapter (`model_setup.adapted_model`)
5. apply the speed options and find a batch size (`speed_setup.py`, `batch_setup.py`)
6. write recipe.resolved.yaml, and build the Trainer with all its parts (`trainer_setup.py`)
7. train (`trained_model.py`), save (`saving.py`), and reopen and evaluate what was saved
   (`saved_evaluation.py`)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from accelerate.utils import set_seed
from accelerate.utils.memory import clear_device_cache
from trl.trainer.sft_config import SFTConfig

from finetune.adapters import initialization
from finetune.autoconfig.batch_size import split_batch
from finetune.checkpointing import resume, resume_contract
from finetune.core import progress, safe_files, upstream_private
from finetune.core.console import Console, quieten_libraries
from finetune.core.errors import Exit, Problem, Stopped, UserError, stage
from finetune.core.run_checks import RunChecks
from finetune.distributed import collectives, launch_environment, restart_together
from finetune.evaluation import scoring
from finetune.hardware import detection
from finetune.kernels import attention_functions
from finetune.models import router_loss
from finetune.preflight import choice_checks, token_checks
from finetune.recipe.schema import Recipe
from finetune.reporting import terminal
from finetune.run_folder import lock
from finetune.run_folder.run_folder import RunFolder
from finetune.speed import apply_to_model
from finetune.training import (
    auto_correction,
    base_fingerprint,
    batch_setup,
    checkpoint_room,
    launch_checks,
    model_setup,
    resolved_recipe,
    resume_facts,
    saved_evaluation,
    speed_setup,
    start_checks,
    step_work,
    stopping,
    trackers,
    training_arguments,
    training_data,
    verify_saved,
)
from finetune.training.auto_correction import Correction, StartAgain
from finetune.training.eval_callback import Validate
from finetune.training.run_context import RunContext, RunData, StepPlan, recording
from finetune.training.saving import save
from finetune.training.stop_condition import Until
from finetune.training.stopping import Stop
from finetune.training.trained_model import train
from finetune.training.trainer import Trainer
from finetune.training.trainer_setup import build

Verbosity = Literal["quiet", "normal", "verbose"]


_RUNNING = threading.Lock()


@contextlib.contextmanager
def only_run() -> Iterator[None]:
    """Refuse a second run in this process (exit 2), because a run sets the random state and the compiler."""
    if not _RUNNING.acquire(blocking=False):
        raise UserError(
            Problem(
                "this process already trains a run",
                why="a run sets the random state of the whole process",
                fix="wait until it ends, or start the second run in another process",
                code="run-folder",
            )
        )
    try:
        yield
    finally:
        _RUNNING.release()


@scoring.memory_errors()
@only_run()
def run(
    recipe: Recipe,
    *,
    verbosity: Verbosity = "normal",
    resumes: str | None = None,
    until: Until | None = None,
    callbacks: Sequence[Any] = (),
    command: bool = False,
) -> RunFolder:
    """Train, save, reopen and evaluate one recipe; returns its run folder.

    Args:
        verbosity: quiet prints errors only; verbose also prints the table of run checks.
        resumes: the checkpoint to resume from: newest, auto (which may also be none) or step-<n>. A finished
            run is left as it is.
        until: when to end before the last step.
        callbacks: more callbacks for the Trainer.
        command: this process is `finetune train`: among others of a launch it may be replaced by a new one
            with the same command, if the first step runs out of memory.

    Raises:
        UserError: the exit code is 2 for the user's input, 3 for the environment, 4 for an artifact that does
            not verify, and 5 for training.
        Stopped: told to end, by a signal or `until`.
    """
    correction = auto_correction.from_environment() if command else auto_correction.NONE
    output_dir = correction.folder or recipe.train.output_dir
    verbosity = verbosity if launch_environment.is_main() else "quiet"
    correction = correction._replace(restarts=command and restart_together.possible())
    if not correction.folder and resume.check_folder(output_dir, resumes, recipe.model_dump(mode="json")):
        if launch_environment.processes() > 1:  # another process may not be finished, and would wait
            collectives.joined(detection.detect().device)
            collectives.agree(resume_facts.recipe_facts(recipe, finished=True))
        Console(quiet=verbosity == "quiet").say(f"{output_dir} is finished: nothing to do")
        return RunFolder(Path(str(output_dir)))
    quieten_libraries()
    options = _RunOptions(resumes, verbosity, callbacks)
    with stopping.Stop(until).listening() as stop:
        try:
            claimed = lock.claimed(output_dir, recipe.origin.path.stem)
            with claimed as output_dir, upstream_private.compile_settings():
                recipe = choice_checks.pinned(recipe)
                while True:  # with stronger settings while the first step runs out of memory
                    try:
                        return _run(recipe, output_dir, stop, options, correction)
                    except StartAgain as again:
                        correction = again.correction
                    stop.failed = False
                    release_memory()
        except Stopped as stopped:
            if stopped.together:
                collectives.end_together()
            raise


def release_memory() -> None:
    """Free what an attempt that ran out of memory held, and forget its peak."""
    torch.compiler.reset()
    clear_device_cache(garbage_collection=True)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class _RunOptions:
    """The arguments of `run` in addition to the recipe."""

    resumes: str | None
    verbosity: Verbosity
    callbacks: Sequence[Any]


def _run(
    recipe: Recipe, output_dir: str | None, stop: Stop, options: _RunOptions, correction: Correction
) -> RunFolder:
    """Run once; raises `StartAgain` if the first step needs stronger settings."""
    run, data, plan = _begin(recipe, output_dir, options, correction)
    with progress.phase(run.console, "loading the model"):
        adapted, plan = _load(run, data, plan)
    with (
        recording(run),
        trackers.running(data.arguments, run.folder) as tracked,
    ):
        plan = _write_start(run, data, adapted, plan)
        router = router_loss.count_experts(adapted.config)
        trainer = build(run, data, adapted, plan, stop, options.callbacks)
        tracked.follow(trainer)
        live = _train(run, data, trainer, stop, router)
        validations = trainer.validations
        del adapted, trainer  # the evaluation needs the memory
        _evaluate(run, live, validations)
    return run.folder


def _begin(
    recipe: Recipe, output_dir: str | None, options: _RunOptions, correction: Correction
) -> tuple[RunContext, RunData, StepPlan]:
    """Join the processes, prepare the data and find the checkpoint to resume.

    `start_checks.check_start` does the same checks for `--dry-run`, without a run folder.
    """
    setup = choice_checks.setup_of(recipe)
    attention_functions.register(setup.attention.value)
    screen = Console(quiet=options.verbosity == "quiet", verbose=options.verbosity == "verbose")
    shards = setup.launch.data_parallel_size
    batch = split_batch(recipe.train, shards)
    collectives.start(setup.hardware.device)
    arguments = training_arguments.training_arguments(recipe.train, recipe.data, setup, batch)
    collectives.agree(resume_facts.recipe_facts(recipe))
    folder = shared_folder(output_dir, arguments)
    start_checks.check_evaluation(recipe)
    set_seed(recipe.train.seed)

    recipe = training_data.with_template_date(recipe, folder, options.resumes)
    with progress.phase(screen, "preparing the data"):
        tokenizer, prepared = training_data.prepare_in_turn(recipe, setup)
    token_checks.check_texts(recipe, tokenizer)
    stopping.check(recipe.train, options.resumes, setup.launch.keeper)
    checkpoint = collectives.from_main(lambda: resume.find(folder, options.resumes))  # and verifies it
    correction = correction._replace(folder=str(folder.path))
    run = RunContext(recipe, setup, RunChecks(), screen, folder, checkpoint, correction)
    data = RunData(tokenizer, prepared, arguments)
    batch = batch_setup.settle_batch(run, batch, arguments)
    steps = start_checks.count_steps(recipe.train, shards, batch, prepared, arguments)
    contract = resume_facts.contract_of(recipe, setup, data, batch, steps, checkpoint)
    return run, data, StepPlan(batch, steps, contract)


def _load(run: RunContext, data: RunData, plan: StepPlan) -> tuple[Any, StepPlan]:
    """Load the model, attach the adapter, apply the speed options, and find the micro-batch size."""
    recipe, setup, report = run.recipe, run.setup, data.prepared.report["train"]
    adapted = model_setup.adapted_model(run, data, plan.steps)
    flops = apply_to_model.flops_per_token(adapted)
    most, whole = step_work.tokens_of(recipe.data, setup.launch.sharing, plan.batch, report)
    work = step_work.work_of(adapted, recipe, setup, most, flops * whole * plan.steps)
    with stage("tried the speed options on the model", "speed"):
        choices = speed_setup.make_fast(run, adapted, data.arguments, work)
    checkpoint_room.check_space(adapted, recipe, setup.launch, run.folder.checkpoints)
    base = base_fingerprint.frozen_fingerprint(adapted, run.checkpoint, run.checks)
    contract = {**plan.contract, "base": base}
    plan = replace(plan, choices=choices, flops_per_token=flops, contract=contract)
    if recipe.train.per_device_train_batch_size == "auto" and not run.correction.micro_batch:
        plan = replace(plan, batch=batch_setup.search_batch(run, data, adapted, plan))
        batch_setup.put_in_arguments(plan.batch, data.arguments)
    return adapted, plan


def _write_start(run: RunContext, data: RunData, adapted: Any, plan: StepPlan) -> StepPlan:
    """Print the plan of the run, and write its settings into the run folder.

    If the initialization of the adapter changed the base model, the initial adapter is written, too.

    Returns:
        `plan` with the run's choices in the contract of its checkpoints.
    """
    recipe, setup, folder, reports = run.recipe, run.setup, run.folder, data.prepared.report
    choices = resolved_recipe.choices(run, plan, adapted)
    run.correction.add_run_checks(run.checks)
    plan = replace(plan, contract=resume_contract.with_choices(plan.contract, choices))
    if not setup.launch.main:
        return plan
    resolved_recipe.write_start(run, choices, reports, adapted, data.arguments)
    repeats = launch_checks.notes_on_repeats(
        recipe.train, data.prepared.rows, plan.batch, setup.launch.data_parallel_size, plan.steps
    )
    terminal.show_plan(run.console, recipe, choices, reports, [*run.checks.notes, *repeats])
    safe_files.make_folder(folder.path, "checkpoints/.staging")
    with safe_files.replace_folder(folder.path, "checkpoints/.staging/initial") as private:
        initialization.save_initial(adapted, private)
    resume.begin(folder, run.checkpoint, plan.contract, run.console)
    return plan


def _train(
    run: RunContext, data: RunData, trainer: Trainer, stop: Stop, router: dict[str, Any]
) -> verify_saved.Live:
    """Train and save. Return what the saved weights are compared with.

    Args:
        router: the values of the model's config that the Trainer has changed.
    """
    folder, adapted = run.folder, cast("Any", trainer.model)
    launch_checks.add_launch_checks(trainer, run.setup.launch, run.checks)
    training_data.add_data_checks(run, data)
    with stop.later(), contextlib.closing(trainer.writer):
        with stage("trained the model", code=Exit.TRAINING):
            train(run, trainer)
        router_loss.restore(adapted.config, router)
        training_data.add_stream_check(run, data.prepared)
        live = verify_saved.remember(adapted, data.prepared.train, run.setup)
        save(adapted, data.tokenizer, folder, folder.staging / "initial", run.console)
    verify_saved.add_file_checks(folder, live, trainer.first_step.plan.steps, run.checks)
    trainer.accelerator.free_memory()
    return live


def _evaluate(run: RunContext, live: verify_saved.Live, validations: Sequence[Validate]) -> None:
    """Reopen what was saved, verify it, and evaluate it against the base model."""
    run.console.say(
        "", "loading the saved weights, and evaluating the base model and the fine-tuned model ..."
    )
    evaluating = progress.phase(run.console, "verifying the saved weights")
    with evaluating, stage("evaluated the model", "eval", code=Exit.TRAINING):
        result = saved_evaluation.reopen_and_evaluate(run, live, validations)
    terminal.show_result(run.console, run.folder, run.checks, result)


def shared_folder(output_dir: str | None, arguments: SFTConfig) -> RunFolder:
    """Return the run folder, which rank 0 has locked and names for all, and let the Trainer write into it.

    Raises:
        UserError: not all processes see it (exit 3).
    """
    folder = RunFolder(Path(collectives.from_main(lambda: output_dir)))
    collectives.on_one_disk(folder.path)
    arguments.output_dir = str(folder.staging)
    arguments.run_name = trackers.safe_name(arguments.run_name or folder.path.name)
    arguments.project = trackers.safe_name(arguments.project)
    return folder
