"""The commands. Nothing heavy is imported until a command needs it: `--help` and `check` never load torch."""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import arguments, launch_env, privacy
from finetune.errors import FULL, Exit, Problem, Stopped, UserError, nearest
from finetune.given import load, located, opened, writing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune.hardware import Start
    from finetune.run_folder import RunFolder


RANK_0_FIRST = 3  # seconds
# Arguments that several commands take
RECIPE = ("recipe", {"metavar": "RECIPE", "help": "a recipe file; `finetune recipes` lists shipped ones"})
MAYBE_RECIPE = ("recipe", {"metavar": "RECIPE", "nargs": "?", "help": "a recipe file"})
RUN = ("run", {"metavar": "RUN", "help": "a run folder, or organisation/name@revision on the Hub"})
OVERRIDES = ("overrides", {"metavar": "key=value", "nargs": "*", "help": "such as adapter.type=ia3"})
OF_RUN = ("overrides", {**OVERRIDES[1], "help": "such as model.name=FOLDER, where the base lies now"})


def main(given: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. A user's error is one message, with no traceback."""
    privacy.switch_off_telemetry()
    if given is None:  # the process is the command's: what ends it is shown masked too
        sys.excepthook = privacy.excepthook
    options = parse(given)
    return guarded(options.command, options)


def guarded(command: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """The exit code of a command; a user's error, or a process of the launch that is gone, is one message."""
    try:
        command(options)
    except UserError as error:
        if options.debug:
            privacy.excepthook(type(error), error, error.__traceback__)
        return failed("\n".join(map(str, error.problems)), error.code)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            print(stopped, file=sys.stderr)
        else:
            time.sleep(RANK_0_FIRST)  # the launcher ends rank 0 as soon as this one has left
        return Exit.STOPPED
    except OSError as error:
        if options.debug or error.errno not in FULL:
            raise
        fix = "room on it, then the same command again; a run goes on with --resume=auto"
        what, where = "there is no room on the disk", str(error.filename or "")
        full = Problem(what, where=where, found=str(error.strerror), fix=fix)
        return failed(str(full), Exit.ENVIRONMENT)
    except RuntimeError as error:
        said = launch_env.lost(error)
        if options.debug or not said:
            raise
        return failed(said, Exit.TRAINING)
    except KeyboardInterrupt:
        if options.debug:
            raise
        print("interrupted before it was done", file=sys.stderr)
        return 130
    return Exit.DONE


def failed(said: str, code: Exit) -> Exit:
    """Say why this process failed, on the screen and to the launcher; returns the exit code."""
    rank, now = int(os.environ.get("RANK", "0")), time.time()
    if rank:
        time.sleep(RANK_0_FIRST)  # where all ranks fail alike, the launcher ends this one meanwhile
    launch_env.report(said, now)
    print(f"rank {rank}: {said}" if rank else said, file=sys.stderr)
    return code


def train(options: argparse.Namespace) -> None:
    """Train, save, reopen and evaluate a recipe."""
    from finetune import check as checks
    from finetune import launch, run_folder
    from finetune import plan as planning
    from finetune import publish as publish_run
    from finetune.screen import Screen, quieten_libraries

    recipe, main = load(options), os.environ.get("RANK", "0") == "0"
    with located(recipe):
        notes = checks.run(recipe)
        if options.dry_run:
            from finetune import dry_run

            return dry_run.run(options, recipe, notes) if main else None
        if options.accelerate:
            checks.pinned(recipe)  # for the processes of the launch; without a config the plan does it
        again = arguments.train_again(options) + flags(options)
        launch.if_needed(again, functools.partial(planning.launch_of, recipe), options.accelerate)
        if main and recipe.publish.repo:
            notes += publish_run.check(recipe.publish, recipe.model.name)
        if main and not options.quiet:
            said_later = {*recipe.origin.notices, *checks.advice(recipe)}
            print("".join(f"note: {note}\n" for note in notes if note not in said_later), end="")
        quieten_libraries()
        from finetune import train as training
        from finetune.scoring import memory_errors

        where = recipe.train.output_dir
        finished = where is not None and run_folder.RunFolder(Path(where)).finished  # it is left as it is
        asked: dict[str, Any] = {"resumes": options.resume, "until": options.until}
        try:
            with memory_errors():
                folder = training.run(recipe, quiet=options.quiet, **asked)
        except Stopped as stopped:
            again = shlex.join(["finetune", *arguments.go_on(options, stopped.folder)])
            raise Stopped(f"{stopped}\n  go on with: {again}") from None
        if main and not (finished and (folder.path / "publish.json").exists()):
            publish_run.after_training(recipe, folder, Screen(quiet=options.quiet))


def check(options: argparse.Namespace) -> None:
    """Check a recipe, its files, its module names and the first rows of its data."""
    from finetune import check as checks
    from finetune.data import bad_rows

    recipe = load(options)
    with located(recipe):
        notes = checks.run(recipe) + bad_rows.first_rows(recipe.data)
    if not options.quiet:
        what = f"{recipe.adapter.type} on {recipe.model.name} with {recipe.data.name}"
        print(*(f"note: {note}" for note in notes), f"fine: {options.recipe}: {what}", sep="\n")
    if options.prove_resume or options.preflight:
        from finetune import preflight, prove
        from finetune.screen import Screen

        prove_it = preflight.run if options.preflight else prove.run
        prove_it(recipe, [options.recipe, *options.overrides], Screen(quiet=options.quiet))


def data(options: argparse.Namespace) -> None:
    """Show what will be trained on, token by token."""
    from finetune import check as checks
    from finetune.screen import Screen, quieten_libraries

    if options.prepare is not None:
        options.overrides.append(f"data.cache={options.prepare}")
    recipe = load(options)
    page = Path(options.html) if options.html is not None else None
    with located(recipe):
        checks.run(recipe)
        if options.prepare is not None and recipe.data.streaming:
            raise UserError(Problem("a stream is prepared while training", "data.streaming", fix="false"))
        kept = [Path(recipe.data.cache)] if options.prepare and recipe.data.cache else []
        for folder in [*kept, *([page.parent] if page else [])]:
            with writing(folder):  # known before the work, not after it
                folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        quieten_libraries()
        tokenizer, prepared = checks.prepare_data(recipe)
    from finetune.data import view

    if isinstance(sys.stdout, io.TextIOWrapper):  # data may hold what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    screen, unasked = Screen(quiet=options.quiet), 0 if page or kept else 3
    view.summary(screen, prepared)
    view.show(screen, tokenizer, prepared, unasked if options.show is None else options.show)
    if page:
        with writing(page):
            length = recipe.data.max_length
            view.write_html(page, tokenizer, prepared, options.recipe, length, options.show)
        screen.say("", f"wrote {page}")
    if kept:
        screen.say("", f"next: {shlex.join(['finetune', 'train', options.recipe, *options.overrides])}")


def plan(options: argparse.Namespace) -> None:
    """Say what a recipe takes in memory, time and money before a weight is loaded, and what to change."""
    from finetune import plan_changes
    from finetune.screen import Screen

    with located(recipe := load(options)):
        asked = plan_changes.Asked(options.gpu, options.gpus, options.price_per_hour, options.accelerate)
        plan_changes.run(recipe, options.overrides, Screen(quiet=options.quiet), asked)


def profile(options: argparse.Namespace) -> None:
    """Trace one step of a recipe: where the time goes, and what to do about it."""
    from finetune.screen import quieten_libraries

    with located(load(options)):
        quieten_libraries()
        from finetune import profile as profiling

        profiling.command(options.recipe, options.overrides, options.output, quiet=options.quiet)


def ablate(options: argparse.Namespace) -> None:
    """Measure each optimisation of a ladder on a recipe, alone and on top of those that helped."""
    with located(load(options)):
        from finetune import ablate as ablation

        file = Path(options.ladder) if options.ladder else ablation.default_ladder()
        asked = ablation.Asked(options.recipe, options.overrides, file, Path(options.output))
        ablation.run(asked, quiet=options.quiet)


def evaluate(options: argparse.Namespace) -> None:
    """Evaluate base and tuned of a run: held-out rows, a general text, tasks of lm-eval or of your own."""
    from finetune import launch
    from finetune.screen import Screen, quieten_libraries

    if options.tasks is not None:  # `--tasks a,b c eval.limit=8`
        tasks = [part for text in options.tasks if "=" not in text for part in text.split(",")]
        options.overrides += [text for text in options.tasks if "=" in text]
        options.overrides.append(f"eval.tasks={json.dumps(tasks)}")
    run = opened(options)
    again = ["evaluate", str(run.path), *options.overrides, *flags(options)]
    launch.if_needed(again, functools.partial(processes_of, run, options.overrides))
    quieten_libraries()
    from finetune import evaluate as evaluation
    from finetune import report as reporting
    from finetune import summary
    from finetune.scoring import memory_errors

    screen = Screen(quiet=options.quiet)
    with memory_errors():
        result = evaluation.run(run.path, options.overrides, screen=screen)
    if os.environ.get("RANK", "0") == "0":
        summary.show_scores(screen, result)
        reporting.after(run.path, screen)


def processes_of(run: RunFolder, overrides: list[str], machine: Any) -> Start:
    """How a run is evaluated on several GPUs; called where there are several."""
    from finetune import evaluate as evaluation

    return evaluation.launch_of(run, overrides, machine)


def merge(options: argparse.Namespace) -> None:
    """Merge a run's adapter into its base, prove that nothing was lost, and quantise it if asked."""
    from finetune.screen import Screen, quieten_libraries

    run = opened(options)
    quieten_libraries()
    from finetune import merge as merging

    given = {"dtype": options.dtype, "quantized": options.quantize, "output": options.output}
    merging.show(Screen(quiet=options.quiet), merging.run(run.path, options.overrides, **given))


def publish(options: argparse.Namespace) -> None:
    """Publish a run to the Hub, privately unless asked: weights, card, results."""
    from finetune import publish as publishing
    from finetune.screen import Screen

    overrides = [*options.overrides, *[f"publish.repo={json.dumps(options.repo)}"] * bool(options.repo)]
    overrides += ["publish.private=false"] if options.public else []
    screen, asked = Screen(quiet=options.quiet), {"merged": options.merged, "dry_run": options.dry_run}
    publishing.run(opened(options).path, screen, overrides, **asked)


def compare(options: argparse.Namespace) -> None:
    """Compare adapter types on one recipe, or two finished runs."""
    from finetune.screen import quieten_libraries

    what = Path(options.what)
    if what.is_dir() or ("@" in options.what and not what.exists()):  # or a run on the Hub
        other = arguments.second_run(options)
        from finetune import differences
        from finetune.screen import Screen

        differences.run(options.what, other, Screen(quiet=options.quiet), must_equal=options.assert_equal)
        return
    if problems := arguments.compare_problems(options):
        raise UserError(*problems)
    recipe = load(argparse.Namespace(recipe=options.what, overrides=options.overrides))
    with located(recipe):
        from finetune import launch

        again = ["compare", *arguments.compare_again(options), *flags(options)]
        launch.if_needed(again, functools.partial(launch.data_parallel, recipe.train))
        quieten_libraries()
        from finetune import compare as comparing

        folder = Path(options.output or f"runs/compare-{Path(options.what).stem}")
        given = (options.what, options.overrides, options.adapters.split(","), options.seeds or 3)
        comparing.run(comparing.Asked(*given, options.budget, folder), quiet=options.quiet)


def tune(options: argparse.Namespace) -> None:
    """Search recipe keys by Optuna: trials in processes of their own, poor ones ended early."""
    from finetune import tune_command

    with located(load(options)):
        tune_command.run(options)


def chat(options: argparse.Namespace) -> None:
    """Talk to a run's base and tuned model side by side."""
    from rich.console import Console

    from finetune.screen import quieten_libraries

    run = opened(options)
    quieten_libraries()
    from finetune import chat as talk

    given = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature}
    talk.run(run.path, Console(highlight=False), options.overrides, prompt=options.prompt, **given)


def report(options: argparse.Namespace) -> None:
    """Write a page about a run: verdict, base against tuned, curves, receipts, data, recipe."""
    from finetune import report as reporting

    path = options.run if os.path.exists(options.run) else opened(options).path  # a part of a run is enough
    reporting.show(*reporting.run(path, options.output), quiet=options.quiet)


def recipes(options: argparse.Namespace) -> None:
    """List the shipped recipes, or copy one to change it."""
    from finetune import given, shipped

    if options.name is None and options.copy is None:
        listed = [f"{name:<24} {shipped.purpose(path)}" for name, path in shipped.recipes().items()]
        given.show("\n".join([*listed, "", "copy one to change it: finetune recipes NAME --copy ."]))
    elif options.name is None or options.copy is None:
        fix = f"finetune recipes {options.name or 'NAME'} --copy {options.copy or '.'}"
        raise UserError(Problem("say which recipe to copy, and where", fix=fix))
    else:
        with given.writing(Path(options.copy)):
            written = shipped.copy(options.name, Path(options.copy))
        print("\n".join(f"wrote {path}" for path in written))
        print(f"next: finetune train {shlex.quote(str(written[0]))}")


def doctor(options: argparse.Namespace) -> None:
    """Say what is installed, what this machine can do and which optimisation is active, and why."""
    from finetune import doctor as examination

    recipe = load(options) if options.recipe else None
    with located(recipe):
        examination.run(recipe, quiet=options.quiet, measured=options.measure)


def parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The whole command-line surface, and each command's; a test pins it."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="errors only")
    common.add_argument("--debug", action="store_true", help="tracebacks")
    top = argparse.ArgumentParser(prog="finetune", description="Fine-tune a language model from one recipe.")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(function: Any, *its: tuple[str, dict[str, Any]]) -> None:
        text = (function.__doc__ or "").strip()
        command = commands.add_parser(function.__name__, help=text, description=text, parents=[common])
        for name, settings in its:
            made = command.add_argument(name, **settings)
            made.required = made.required and settings.get("nargs") != "*"  # argparse asks for one
        command.set_defaults(command=function)

    add(train, RECIPE, OVERRIDES, *arguments.TRAIN)
    add(check, RECIPE, OVERRIDES, *arguments.CHECK)
    add(data, RECIPE, OVERRIDES, *arguments.DATA)
    add(plan, RECIPE, OVERRIDES, *arguments.PLAN)
    add(profile, RECIPE, OVERRIDES, arguments.TRACED)
    add(ablate, RECIPE, OVERRIDES, *arguments.ABLATE)
    add(evaluate, RUN, OF_RUN, *arguments.EVALUATE)
    add(merge, RUN, OF_RUN, *arguments.MERGE)
    add(publish, RUN, OF_RUN, *arguments.PUBLISH)
    add(report, RUN, ("--output", {"metavar": "FILE", "help": "the page: RUN/report.html"}))
    add(compare, *arguments.COMPARE)
    add(tune, RECIPE, OVERRIDES, *arguments.TUNE)
    add(chat, RUN, OF_RUN, *arguments.CHAT)
    add(recipes, *arguments.RECIPES)
    add(doctor, MAYBE_RECIPE, OVERRIDES, arguments.MEASURE)
    return top, commands.choices


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """argparse ends a list of positionals at the first option; overrides may also follow options."""
    top, commands = parser()
    words = list(sys.argv[1:] if given is None else given)
    if words and not words[0].startswith("-") and words[0] not in commands:
        meant = nearest(words[0], commands)
        top.error(
            f"no command {words[0]!r}; {f'try {meant}' if meant else 'there are ' + ', '.join(commands)}"
        )
    options, extra = top.parse_known_args(arguments.in_order(words))
    if extra and not (
        hasattr(options, "overrides") and all("=" in e and not e.startswith("-") for e in extra)
    ):
        (commands.get(words[0]) or top).error(f"unrecognized arguments: {' '.join(extra)}")
    if extra:
        options.overrides += extra
    return options


def flags(options: argparse.Namespace) -> list[str]:
    """The flags every command has, as they were given."""
    return [f"--{flag}" for flag in ("quiet", "debug") if getattr(options, flag)]
