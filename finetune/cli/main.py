"""Parse the command line and run a command.

Heavy imports happen only in the commands that need them. `--help` and `check` do not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.cli import (
    ablate,
    arguments,
    chat,
    check,
    compare,
    data,
    doctor,
    evaluate,
    explain,
    export_model,
    import_recipe,
    init,
    inputs,
    json_output,
    merge,
    plan,
    profile,
    publish,
    recipes,
    report,
    sweep,
    train,
)
from finetune.core import errors, import_paths, privacy, standard_streams
from finetune.core.errors import Exit, Stopped, UserError, nearest, panics_as_errors
from finetune.core.privacy import masked
from finetune.core.visible_text import visible
from finetune.distributed import launch_environment
from finetune.recipe import renames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune.core.errors import Problem

RANK_0_FIRST = 3  # seconds
VERSION = sys.modules["finetune"].__version__  # import-linter forbids an import of the package here


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A user's error prints one message without a traceback."""
    privacy.switch_off_telemetry()
    if given is None:  # this process runs only the command, so uncaught errors are masked too
        import_paths.leave_working_directory()
        sys.excepthook = privacy.excepthook
        standard_streams.allow_closing()
    options = parse(given)
    if not options.json:
        return guarded(options.command, options).code
    with contextlib.redirect_stdout(sys.stderr):
        outcome = guarded(options.command, options)
    if os.environ.get("RANK", "0") == "0":
        own = arguments.command_name(options.command)
        standard_streams.say(json_output.render(own, outcome.code, outcome.result, outcome.problems))
    return outcome.code


class Outcome(NamedTuple):
    """The exit code, result and problems of a command."""

    code: int
    result: object = None
    problems: tuple[Problem, ...] = ()


def guarded(command: Callable[[argparse.Namespace], object], options: argparse.Namespace) -> Outcome:
    """Run a command. Print one message for any exception; `--debug` prints the traceback too."""
    try:
        with panics_as_errors():
            return Outcome(Exit.DONE, command(options))
    except UserError as error:
        if options.debug:
            privacy.excepthook(type(error), error, error.__traceback__)
        return failed(error)
    except Stopped as stopped:
        if os.environ.get("RANK", "0") == "0":
            standard_streams.say(*str(stopped).split("\n"), error=True)
        else:
            time.sleep(RANK_0_FIRST)  # the launcher ends rank 0 as soon as this process exits
        return Outcome(Exit.STOPPED, {"stopped": str(stopped), "run": stopped.folder})
    except Exception as error:  # the last resort: print a message instead of a traceback
        if options.debug:
            raise
        if problem := launch_environment.lost(error):
            return failed(UserError(problem, code=Exit.TRAINING))
        return failed(errors.explain(error, f"ran `finetune {arguments.command_name(command)}`"))
    except KeyboardInterrupt:
        if options.debug:
            raise
        standard_streams.say("interrupted before it was done", error=True)
        return Outcome(130)


def failed(error: UserError) -> Outcome:
    """Report why this process failed, on the screen and to the launcher."""
    rank, now = int(os.environ.get("RANK", "0")), time.time()
    if rank:
        time.sleep(RANK_0_FIRST)  # if all ranks fail, the launcher ends this process in the meantime
    said = "\n".join(map(str, inputs.with_lines(error.problems)))
    launch_environment.report(said, now)
    standard_streams.say(*(f"rank {rank}: {said}" if rank else said).split("\n"), error=True)
    return Outcome(error.code, problems=error.problems)


@functools.cache
def parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and the parser of each command. A test compares its output."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="print only errors")
    common.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    text = "print one JSON object on standard output, and all other text on standard error"
    common.add_argument("--json", action="store_true", help=text)
    top = argparse.ArgumentParser(
        prog="finetune",
        description="Fine-tune a language model from one recipe: a YAML file with model, data and training.",
        epilog="First steps: `finetune train quickstart` trains a shipped recipe without a GPU. "
        "`finetune init` writes your own recipe. Set a key with KEY=VALUE: `finetune train my.yaml "
        "train.learning_rate=1e-4`. `finetune COMMAND --help` shows the options of a command.",
    )
    top.add_argument("--version", action="version", version=f"finetune {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(function: Callable[..., Any], *its: tuple[str, dict[str, Any]]) -> None:
        text = (function.__doc__ or "").strip()
        own = arguments.command_name(function)
        command = commands.add_parser(own, help=text, description=text, parents=[common])
        for name, settings in its:
            made = command.add_argument(name, **settings)
            made.required = made.required and settings.get("nargs") != "*"  # argparse would require a value
        command.set_defaults(command=function)

    add(train.train, arguments.RECIPE, arguments.OVERRIDES, *train.TRAIN)
    add(check.check, arguments.RECIPE, arguments.OVERRIDES, *check.CHECK)
    add(data.data, arguments.RECIPE, arguments.OVERRIDES, *data.DATA)
    add(plan.plan, arguments.RECIPE, arguments.OVERRIDES, *plan.PLAN)
    add(profile.profile, arguments.RECIPE, arguments.OVERRIDES, profile.TRACED)
    add(ablate.ablate, arguments.RECIPE, arguments.OVERRIDES, *ablate.ABLATE)
    add(evaluate.evaluate, arguments.RUN, arguments.OF_RUN, *evaluate.EVALUATE)
    add(merge.merge, arguments.RUN, arguments.OF_RUN, *merge.MERGE)
    add(export_model.export_model, export_model.SOURCE, arguments.OF_RUN, *export_model.EXPORT)
    add(publish.publish, arguments.RUN, arguments.OF_RUN, *publish.PUBLISH)
    add(
        report.report,
        arguments.RUN,
        ("--output", {"metavar": "FILE", "help": "the HTML file (default: RUN/report.html)"}),
    )
    add(compare.compare, *compare.COMPARE)
    add(sweep.sweep, arguments.RECIPE, arguments.OVERRIDES, *sweep.SWEEP)
    add(chat.chat, arguments.RUN, arguments.OF_RUN, *chat.CHAT)
    add(init.init, *init.INIT)
    add(import_recipe.import_recipe, *import_recipe.IMPORT)
    add(recipes.recipes, *recipes.RECIPES)
    add(explain.explain, *explain.EXPLAIN)
    add(doctor.doctor, arguments.MAYBE_RECIPE, arguments.OVERRIDES, doctor.MEASURE)
    return top, commands.choices


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides may follow options, although argparse ends the list at an option."""
    top, commands = parser()
    words = list(sys.argv[1:] if given is None else given)
    if not words:
        top.error("name a command; `finetune --help` lists them")
    if not words[0].startswith("-") and words[0] not in commands:
        meant = renames.COMMANDS.get(words[0]) or nearest(words[0], commands)
        top.error(
            f"no command {words[0]!r}; {f'try {meant}' if meant else 'there are ' + ', '.join(commands)}"
        )
    options, extra = top.parse_known_args(arguments.in_order(words))
    if extra and not (
        hasattr(options, "overrides") and all("=" in e and not e.startswith("-") for e in extra)
    ):
        given = [word.partition("=")[0] for word in extra]
        renamed = [f"{old} is {new} now" for old, new in renames.OPTIONS.items() if old in given]
        what = "; ".join([f"unrecognized arguments: {' '.join(extra)}", *renamed])
        (commands.get(words[0]) or top).error(visible(masked(what)))
    if extra:
        options.overrides = [*options.overrides, *extra]  # not the default of the next parse
    return options
