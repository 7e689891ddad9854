"""Search recipe values with Optuna: `finetune sweep RECIPE [--space FILE] [--trials N | --hours H]`.

DIR/study.db          the study, unless --storage names another place
DIR/trial-0007/       each trial is an ordinary run folder; DIR/logs/ has its output
DIR/trials.csv, trials.json, sweep.html, *.svg    results (`experiments/sweep/sweep_report.py`)
DIR/best.yaml         the best recipe, with the source of each value
DIR/final.yaml        the recipe that trains DIR/final/ with --final

The same command resumes. If a worker was killed, its trial is run again. Several workers, on one or many
machines, share a study through its storage and its name, which is the name of DIR.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from finetune.core import progress, safe_files, signals
from finetune.core.console import Console
from finetune.core.errors import Exit, Problem, Stopped, UserError, first_line, in_one_line
from finetune.experiments.runner import kept_runs, worker_process
from finetune.experiments.sweep import search_space, search_space_checks, study_storage, sweep_report
from finetune.experiments.sweep.search_space_checks import SweepRequest
from finetune.recipe.loader import load as load_recipe
from finetune.run_folder import lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from finetune.experiments.sweep.search_space import Space
    from finetune.recipe.schema import Recipe

TRIALS = 20  # the default if neither a number nor a time is given
BEAT = 10.0  # seconds between two signs of life in the study
DATE = "template_date"  # of the study's attributes
HOPELESS = 5  # if this many trials fail and none succeeds, the values are not the cause


class Search(NamedTuple):
    """A search in progress."""

    asked: SweepRequest
    recipe: Recipe
    space: Space
    found: search_space_checks.Looked
    study: Study
    screen: Console
    deadline: float
    told: Told
    files: dict[str, str]
    """`kept_runs.files_read` of the recipe and of each trial, before the first trial that reads a file."""
    ran: list[Problem | None]
    """One entry for each trial of this process: the problem if it failed. Rejected values have no entry."""

    @property
    def most(self) -> float:
        """Maximum number of trials."""
        limit = TRIALS if self.asked.seconds is None else float("inf")
        return limit if self.asked.trials is None else self.asked.trials


class Told:
    """The signal that told this process to end."""

    by = ""

    def heard(self, name: str) -> None:
        self.by = name
        text = "ending this trial; the study runs it again later. Send the signal again to end at once"
        os.write(2, f"\n{name}: {text}\n".encode())


def run(requested: SweepRequest, *, quiet: bool = False) -> dict[str, Any]:
    """Search, and return the content of trials.json.

    Raises:
        UserError: the recipe or the space is not valid (exit 2), the environment lacks something (exit 3), or
            no trial succeeded (exit 5).
        Stopped: a signal arrived. The same command resumes.
    """
    screen = Console(quiet=quiet)
    with progress.phase(screen, "checking the search space"):
        recipe, found = search_space_checks.prepare(requested)
    kept_runs.make_folder(requested.folder, "sweep")
    safe_files.make_folder(requested.folder, "logs")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with study_storage.opened(
        requested.url,
        study_storage.name_in(requested.url, requested.folder),
        maximize=recipe.eval.metric_for_best_model != "loss",
        pruner=pruner(found.space, recipe),
    ) as study:
        deadline = time.monotonic() + requested.seconds if requested.seconds is not None else float("inf")
        files = kept_runs.files_and_recipe(recipe)
        job = Search(requested, recipe, found.space, found, study, screen, deadline, Told(), files, [])
        try:
            accepted = hold(
                study, requested.folder, search_space.identity(recipe, found.space, found.content)
            )
            notes = [*accepted, *hold_date(study, found.date), *found.notes]
            screen.say(*[f"note: {note}" for note in notes])
            content = search(job)
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            raise study_storage.unreachable(error, requested.url) from None
    if job.told.by:
        raise Stopped(
            f"stopped by {job.told.by}; run the same command again to continue in {requested.folder}"
        )
    sweep_report.show(screen, requested, content)
    if content["best"] is None or hopeless(job):
        failed = [one for one in job.ran if one] if hopeless(job) else problems(content)
        raise UserError(*failed, code=Exit.TRAINING)
    if requested.final:
        make_way(requested.folder, screen)
        final(requested)
    return content


def problems(content: dict[str, Any]) -> list[Problem]:
    """Return why no trial succeeded."""
    rows = [row for row in content["trials"] if row["state"] in ("failed", "pruned")][:HOPELESS]
    said = [
        _failed(f"trial {row['number']} {row['state']}", row["reason"], f"trial-{row['number']:04d}")
        for row in rows
    ]
    return said or [
        Problem(
            "the sweep finished no trial",
            found="0 finished trials",
            fix="raise --trials or --hours",
            code="experiment",
        )
    ]


def _failed(what: str, reason: str, folder: str) -> Problem:
    """Return the problem of a trial that ended without a score."""
    return Problem(
        what, found=reason, fix=f"read logs/{folder}.txt in the folder of the sweep", code="experiment"
    )


def search(job: Search) -> dict[str, Any]:
    """Run all remaining trials, and return the content of trials.json."""
    introduce(job)
    with signals.listening(job.told.heard), show_progress(job):
        while begin_another(job):
            one(job)
            sweep_report.write_trials(job.asked.folder, job.study)
            progress.reach(finished(job.study))
    return sweep_report.write(job.asked, job.study, job.recipe, job.space, job.found.rows)


@contextlib.contextmanager
def show_progress(job: Search) -> Iterator[None]:
    """Show the share of the trials that are finished, or the share of `--hours` that has passed."""
    if not (seconds := job.asked.seconds):
        with progress.phase(job.screen, "sweep", parts=round(job.most)):
            progress.reach(finished(job.study))
            yield
        return
    whole = progress.phase(job.screen, "sweep", parts=1)
    with whole, progress.part("", lambda: 1 - (job.deadline - time.monotonic()) / seconds):
        yield


def finished(study: Study) -> int:
    """Return the number of finished trials that count."""
    return sum(one.state.is_finished() for one in counted(study))


def hold(study: Study, folder: Path, own: dict[str, str]) -> list[str]:
    """Check that a study is resumed with the values it was started with.

    Returns:
        A note if an older version of finetune finished some of its trials.

    Raises:
        UserError: the study has another recipe or space (exit 2), or is damaged (exit 4).
    """
    old = study_storage.verify(study, str(folder))
    files = {search_space.BASE, search_space.ROWS}  # studies of older versions do not know them
    began = {key: own[key] for key in own.keys() & files} | study.user_attrs.get("identity", own)
    kept_runs.check_same(
        began,
        own,
        folder,
        "choose a new folder with --output, or use the earlier recipe, overrides and search space",
    )
    maximize = own.get("eval.metric_for_best_model", "loss") != "loss"
    if study.direction != (StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE):
        raise study_storage.damaged(str(folder), [f"the direction, {study.direction.name.lower()}"])
    if "identity" not in study.user_attrs:
        study.set_user_attr("identity", own)
    study_storage.add_hashes(study, old)
    said = f"trials of an older finetune version: {len(old)}; finetune can't verify their values"
    return [said] if old else []


def hold_date(study: Study, today: str | None) -> list[str]:
    """Give all trials the date of the study's first day, because other dates make other examples.

    Args:
        today: the date that the chat template would get, or `None` if it asks for none.
    """
    if today is None:
        return []
    if DATE not in study.user_attrs:
        study.set_user_attr(DATE, today)
    return [f"the chat template of every trial gets the date {study.user_attrs[DATE]} (data.template_date)"]


def pruner(space: Space, recipe: Recipe) -> optuna.pruners.BasePruner:
    search = space.search
    most = search.evaluations
    stated, steps = recipe.eval.eval_steps, recipe.train.max_steps
    if stated and (stated < 1 or steps):
        most = math.ceil(1 / stated if stated < 1 else (steps or 1) / stated)
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=search.startup_trials, n_warmup_steps=0)
    if search.pruner == "hyperband":
        return optuna.pruners.HyperbandPruner(min_resource=1, max_resource=max(most, 1), reduction_factor=3)
    return optuna.pruners.NopPruner()


def sampler(space: Space, seed: int) -> optuna.samplers.BaseSampler:
    """Return a new sampler for each trial.

    A resumed study or a second worker would otherwise draw equal numbers.
    """
    if space.search.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, n_startup_trials=space.search.startup_trials)


def introduce(job: Search) -> None:
    """Show the search space, and queue the recipe's own values as the first trial."""
    request, study, screen = job.asked, job.study, job.screen
    own = search_space.own_draw(job.space, job.recipe, job.found.unsaid)
    kind = job.recipe.adapter.type
    away = [key for key in job.space.parameters if search_space.has_key(kind, key) and key not in own]
    known = study.get_trials(deepcopy=False)
    begun = any("own" in one.user_attrs for one in known)
    if not begun:
        study.enqueue_trial(own, {"own": True, "without": away})
    if away:
        keys = ", ".join(away)
        screen.say(f"note: the search space lacks the recipe's value of {keys}; only the first trial uses it")
    rows = [(key, sweep_report.described(one)) for key, one in job.space.parameters.items()]
    screen.table(f"search space of {request.folder}", ("key", "values"), rows)
    search, best = job.space.search, job.recipe.eval.metric_for_best_model
    often = (
        f"every {search_space.every(job.recipe, search, job.found.rows)} steps"
        if job.recipe.eval.eval_steps
        else f"{search.evaluations} times"
    )
    what = {"loss": "validation loss", "exact_match": "exact match"}[best]
    screen.say(f"metric: {what}, {often} per trial; sampler {search.sampler}; pruner {search.pruner}", "")
    if known:
        shown = study_storage.shown(request.url)
        screen.say(f"continuing the study {shown} after {finished(study)} finished trials", "")


def begin_another(job: Search) -> bool:
    """Queue the trials that dead workers left behind, and return whether another trial is needed."""
    if job.told.by or time.monotonic() > job.deadline:
        return False
    if hopeless(job):
        job.screen.say(f"the search ends, because the first {HOPELESS} trials of this worker all failed")
        return False
    for number in study_storage.take_over(job.study):
        job.screen.say(f"the worker of trial {number} ended; the study runs the trial again")
    trials = counted(job.study)
    return any(one.state == TrialState.WAITING for one in trials) or len(trials) < job.most


def counted(study: Study) -> list[FrozenTrial]:
    """Return the trials that count, without lost trials, which are run again, and without surplus trials."""
    every = study.get_trials(deepcopy=False)
    return [one for one in every if not (study_storage.is_lost(one) or sweep_report.is_surplus(one))]


def hopeless(job: Search) -> bool:
    """Return whether all trials of this process failed. Other workers of the study continue."""
    return len(job.ran) >= HOPELESS and all(job.ran)


def one(job: Search) -> None:
    """Run one trial. If another worker has taken it over, leave it to that worker."""
    drawn = job.study.ask()
    folder = job.asked.folder / f"trial-{drawn.number:04d}"
    try:
        attempt(job, drawn, folder)
    except optuna.exceptions.UpdateFinishedTrialError:
        with contextlib.suppress(OSError):
            safe_files.remove(folder, "checkpoints")
        what = f"another worker took it over, because this one was silent for {study_storage.SILENT:.0f} s"
        job.screen.say(f"trial {drawn.number}: {what}")


def attempt(job: Search, drawn: optuna.Trial, folder: Path) -> None:
    """Draw a trial's values, run it, and tell the study how it ended."""
    study, request = job.study, job.asked
    study_storage.describe(drawn)
    # Two workers asked for the last trial at the same time
    if sum(one.number <= drawn.number for one in counted(study)) > job.most:
        drawn.set_user_attr("reason", sweep_report.SURPLUS)
        study_storage.tell(study, drawn, None, TrialState.FAIL)
        return
    study.sampler = sampler(job.space, job.recipe.train.seed + drawn.number)
    without = drawn.user_attrs.get("without", ())
    try:
        values = search_space.draw(drawn, job.space, job.recipe, without)
    except (ValueError, TypeError, LookupError) as error:
        found = f"trial {drawn.number} ({type(error).__name__}: {first_line(error)})"
        raise study_storage.damaged(str(request.folder), [found]) from None
    drawn.set_user_attr("values", values)
    try:
        words, recipe = words_of(job, values, folder)
        kept_runs.files_read(recipe)  # a file that does not exist
    except UserError as error:  # values that are valid alone but not together
        ended = worker_process.Ended("failed", None, in_one_line(error), 0.0, None)
    else:
        check_files(job, drawn, recipe)
        judge, waiting = judges(job, drawn)
        log = request.folder / "logs" / f"{folder.name}.txt"
        key, cpu = f"eval_{job.recipe.eval.metric_for_best_model}", job.found.device == "cpu"
        steps = values.get("train.max_steps", job.recipe.train.max_steps)
        epochs = values.get("train.num_train_epochs", job.recipe.train.num_train_epochs)
        with kept_runs.part(f"trial {drawn.number}", folder, steps, epochs):
            ended = worker_process.run(worker_process.Trial(words, folder, log, cpu), key, judge, waiting)
        check_files(job, drawn, recipe)
        if ended.state != "lost":
            failed = _failed(f"trial {drawn.number} failed", ended.reason, folder.name)
            job.ran.append(failed if ended.state == "failed" else None)
    record(job, drawn, ended)


def check_files(job: Search, drawn: optuna.Trial, recipe: Recipe) -> None:
    """Raise a UserError if a file changed that another trial read. The study runs this trial again later."""
    try:
        now = {**kept_runs.files_and_recipe(job.recipe), **kept_runs.files_read(recipe)}
        kept_runs.check_unchanged(
            {name: job.files.get(name, now[name]) for name in now}, now, job.asked.folder
        )
    except UserError:
        record(job, drawn, worker_process.Ended("lost", None, "a file changed", 0.0, None))
        raise
    job.files.update(now)


def words_of(job: Search, values: dict[str, Any], folder: Path) -> tuple[list[str], Recipe]:
    """Return the arguments of `finetune train` for a trial, and its recipe.

    Raises:
        UserError: the values conflict.
    """
    given = [*job.asked.overrides, *search_space.overrides(values)]
    recipe = load_recipe(job.asked.path, given)
    every = search_space.every(recipe, job.space.search, job.found.rows)
    mine = [*search_space.IN_TRIALS, f"eval.eval_steps={every}", kept_runs.in_folder(folder)]
    if date := job.study.user_attrs.get(DATE):
        mine.append(f"data.template_date={date}")
    launched = ["--accelerate", job.asked.accelerate] if job.asked.accelerate else []
    return [job.asked.path, *given, *mine, *launched], recipe


def judges(job: Search, drawn: optuna.Trial) -> tuple[Any, Any]:
    """Return two functions that say why a trial must end: on an evaluation, and while waiting.

    The second one checks the time limit and signals.
    """
    said = {"alive": time.monotonic()}
    recipe, space, best = job.recipe, job.space, job.recipe.eval.metric_for_best_model

    def judge(evaluation: worker_process.Evaluation) -> str:
        if not math.isfinite(evaluation.value):
            return f"{best} is {evaluation.value} at step {evaluation.step}"
        drawn.report(evaluation.value, evaluation.place)
        last = not recipe.eval.eval_steps and evaluation.place >= space.search.evaluations
        if last or not drawn.should_prune():
            return ""
        found = f"{best} {evaluation.value:.4g} at step {evaluation.step}"
        return f"{found}: stopped by the {space.search.pruner} pruner"

    def waiting() -> tuple[str, str]:
        if time.monotonic() - said["alive"] > BEAT:
            said["alive"] = time.monotonic()
            drawn.set_user_attr("alive", time.time())
        if job.told.by:
            return f"stopped by {job.told.by}", "lost"
        if time.monotonic() > job.deadline:
            return "the time of the search ended", "pruned"
        return "", ""

    return judge, waiting


def record(job: Search, drawn: optuna.Trial, ended: worker_process.Ended) -> None:
    """Report the result to the study. A lost trial has no reason and is queued again."""
    number, study = drawn.number, job.study
    drawn.set_user_attr("seconds", ended.seconds)
    if ended.started_seconds is not None:
        drawn.set_user_attr("started_seconds", ended.started_seconds)
    if ended.state != "lost" and ended.reason:
        drawn.set_user_attr("reason", ended.reason)
    state = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(ended.state, TrialState.FAIL)
    study_storage.tell(study, drawn, ended.value, state)
    if ended.state == "lost":
        study_storage.take_over(study)
        job.screen.say(f"trial {number}: {ended.reason}; the study runs it again later")
        return
    done = finished(study)
    of = f"/{job.most:.0f}" if job.most != float("inf") else ""
    head = f"{done}{of}  trial {number}:"
    if ended.value is None:
        word = "pruned" if ended.state == "pruned" else "FAILED"
        job.screen.say(f"{head} {word}: {ended.reason}")
        return
    best = "  best so far" if study.best_trial.number == number else ""
    job.screen.say(
        f"{head} {job.recipe.eval.metric_for_best_model} {ended.value:.4f}, {ended.seconds:.0f} s{best}"
    )


def make_way(folder: Path, screen: Console) -> None:
    """Move a final run of an earlier best recipe aside, and store the recipe of the new one.

    Raises:
        UserError: another worker is training it (exit 2).
    """
    best, begun, run = folder / sweep_report.BEST, folder / "final.yaml", folder / "final"
    if run.exists():
        if not begun.exists() or load_recipe(best).model_dump() == load_recipe(begun).model_dump():
            return
        try:
            with lock.claimed(str(run), run.name):
                moved = kept_runs.set_aside(run)
        except UserError as error:
            raise UserError(
                Problem(
                    "another worker trains the final run of an earlier best recipe",
                    where=str(run),
                    found=error.problems[0].found,
                    fix="run the same command again when that run has ended",
                    code="experiment",
                )
            ) from error
        safe_files.remove(moved, lock.LOCK)
        screen.say(f"the folder `final` holds an earlier best recipe; finetune moved it to {moved}")
    safe_files.write_bytes(folder, begun.name, best.read_bytes())


def final(requested: SweepRequest) -> None:
    """Train the best recipe with everything that trials switch off, such as compile and tasks.

    It is evaluated as often as a trial. A signal is passed on to the run, and this process waits until the
    run has saved.

    Raises:
        UserError: the run failed, with its own exit code.
        Stopped: a signal arrived. The same command resumes.
    """
    best, folder = requested.folder / sweep_report.BEST, requested.folder / "final"
    words = ["train", str(best), kept_runs.in_folder(folder), "--resume=auto"]
    words += ["--accelerate", requested.accelerate] if requested.accelerate else []
    running, told = list[subprocess.Popen[bytes]](), list[str]()

    def heard(name: str) -> None:
        told.append(name)
        text = "the final run saves a checkpoint and ends. Send the signal again to end at once"
        os.write(2, f"\n{name}: {text}\n".encode())
        for process in running:
            process.terminate()

    with signals.listening(heard):
        command = [sys.executable, "-m", "finetune", *words]
        running.append(subprocess.Popen(command, start_new_session=True, preexec_fn=worker_process.tie))
        if told:  # a signal arrived during the start
            running[0].terminate()
        code = running[0].wait()
    fix = shlex.join(["finetune", *words])
    if code == Exit.STOPPED or (told and code < 0):
        by = f" by {told[0]}" if told else ""
        raise Stopped(f"the final run was stopped{by}; to continue, run the same command again, or: {fix}")
    if code:
        raise UserError(
            Problem(
                "the final run failed",
                where=str(folder),
                found=f"exit code {code}; its errors are printed above",
                fix=fix,
                code="experiment",
            ),
            code=Exit.of(code),
        )
