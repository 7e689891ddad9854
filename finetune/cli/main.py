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
    command_parser,
    compare,
    data,
    doctor,
    evaluate,
    explain,
    export_model,
    import_recipe,
    init,
    inputs,
    interrupt,
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
from finetune.core.command_lines import command
from finetune.core.errors import Exit, Problem, Stopped, UserError, nearest, panics_as_errors
from finetune.distributed import launch_environment
from finetune.recipe import renames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RANK_0_FIRST = 3  # seconds
DESCRIPTION = "Fine-tune a language model. A recipe is a YAML file: model, data and training."
FIRST_STEPS = """\
First steps:
  finetune train quickstart                         train a shipped recipe (CPU)
  finetune init                                     write your own recipe
  finetune train my.yaml train.learning_rate=1e-4   change a key of a recipe
  finetune COMMAND --help                           options of a command"""
VERSION = sys.modules["finetune"].__version__  # import-linter forbids an import of the package here


def main(given: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A user's error prints one message without a traceback."""
    privacy.switch_off_telemetry()
    if given is None:  # this process runs only the command, so uncaught errors are masked too
        sys.excepthook = privacy.excepthook
        standard_streams.open_closed()
        standard_streams.allow_closing()
        interrupt.note()
    words = list(sys.argv[1:] if given is None else given)
    try:
        if given is None:
            import_paths.leave_working_directory()
        launch_environment.check_variables()
        options = parse(words)
    except UserError as error:
        return finished(" ".join(words[:1]), failed(error), as_json="--json" in words)
    except KeyboardInterrupt:
        return interrupt.before_the_command(words)
    own = arguments.command_name(options.command)
    if not options.json:
        return guarded(options.command, options).code
    with contextlib.redirect_stdout(sys.stderr):
        outcome = guarded(options.command, options)
    return finished(own, outcome, as_json=True)


def finished(command: str, outcome: Outcome, *, as_json: bool) -> int:
    """Return the exit code of a command. With `--json`, rank 0 prints the result."""
    if as_json and launch_environment.is_main():
        try:
            standard_streams.say(json_output.render(command, outcome.code, outcome.result, outcome.problems))
        except OSError as error:
            return failed(errors.explain(error, f"printed the result of `finetune {command}`")).code
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
    except Stopped as stopped:
        if launch_environment.is_main():
            standard_streams.say(*str(stopped).split("\n"), error=True)
        else:
            time.sleep(RANK_0_FIRST)  # the launcher ends rank 0 as soon as this process exits
        return Outcome(Exit.STOPPED, {"stopped": str(stopped), "run": stopped.folder})
    except (Exception, KeyboardInterrupt) as error:  # the last resort: print a message instead of a traceback
        if options.debug:
            privacy.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, UserError):
            return failed(error)
        if isinstance(error, KeyboardInterrupt) or interrupt.heard():
            standard_streams.say(interrupt.MESSAGE, error=True)
            return Outcome(interrupt.CODE)
        if problem := launch_environment.lost(error):
            return failed(UserError(problem, code=Exit.TRAINING))
        return failed(errors.explain(error, f"ran `finetune {arguments.command_name(command)}`"))


def failed(error: UserError) -> Outcome:
    """Report why this process failed, on the screen and to the launcher."""
    rank, now = int(os.environ.get("RANK", "0")), time.time()
    if rank:
        time.sleep(RANK_0_FIRST)  # if all ranks fail, the launcher ends this process in the meantime
    last = getattr(error, "__notes__", [])
    said = "\n".join(map(str, [*inputs.with_lines(error.problems), *last]))
    launch_environment.report(said, now)
    standard_streams.say(*(f"rank {rank}: {said}" if rank else said).split("\n"), error=True)
    return Outcome(error.code, problems=error.problems)


@functools.cache
def parser() -> tuple[command_parser.CommandParser, dict[str, command_parser.CommandParser]]:
    """Return the parser of the command line, and the parser of each command. A test compares its output."""
    common = command_parser.CommandParser(add_help=False)
    common.add_argument("--quiet", action="store_true", help="print only errors")
    common.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    common.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on standard output, and all other text on standard error",
    )
    top = command_parser.CommandParser(
        prog="finetune",
        usage="finetune COMMAND [...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=FIRST_STEPS,
    )
    top.add_argument("--version", action="version", version=f"finetune {VERSION}", help="print the version")
    commands = top.add_subparsers(
        prog="finetune", help=argparse.SUPPRESS, required=True
    )  # the description lists them
    described: dict[str, str] = {}

    def add(function: Callable[..., Any], *its: tuple[str, dict[str, Any]]) -> None:
        text = (function.__doc__ or "").strip()
        own = arguments.command_name(function)
        described[own] = text
        one = commands.add_parser(own, help=text, description=text, parents=[common])
        for name, settings in its:
            made = one.add_argument(name, **settings)
            made.required = made.required and settings.get("nargs") != "*"  # argparse would require a value
        one.set_defaults(command=function)

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
    top.description = f"{DESCRIPTION}\n\n{command_parser.grouped(described)}".rstrip()
    return top, commands.choices


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Overrides may follow options, although argparse ends the list at an option.

    Raises:
        UserError: the command line has a mistake.
    """
    top, commands = parser()
    words, code = list(words), "command-line"
    if not words:
        raise UserError(Problem("the command is missing", fix=command("--help"), code=code))
    if words[0] not in {*commands, "-h", "--help", "--version"}:
        meant = renames.COMMANDS.get(words[0]) or nearest(words[0], commands)
        raise UserError(
            Problem(
                f"there is no command `{words[0]}`",
                fix=command(*([meant, *words[1:]] if meant else ["--help"])),
                code=code,
            )
        )
    options, extra = top.parse_known_args(arguments.in_order(words))
    overrides = hasattr(options, "overrides")
    if wrong := [word for word in extra if not overrides or "=" not in word or word.startswith("-")]:
        raise UserError(commands[words[0]].unknown(wrong[0]))
    if extra:
        options.overrides = [*options.overrides, *extra]  # not the default of the next parse
    return options
