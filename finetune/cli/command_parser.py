"""An argparse parser whose help groups the commands, and whose errors look like all errors of finetune."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from finetune.core import upstream_private
from finetune.core.command_lines import command
from finetune.core.errors import Problem, UserError, nearest
from finetune.recipe import renames

# In the order in which a user meets them
GROUPS = {
    "Start": ("init", "recipes", "import", "doctor"),
    "Before you train": ("check", "data", "plan"),
    "Train": ("train", "compare", "sweep"),
    "Understand a run": ("report", "evaluate", "profile", "ablate", "explain"),
    "Use the result": ("chat", "merge", "export", "publish"),
}
_OF_ARGUMENT = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)
_CHOICE = re.compile(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", re.DOTALL)
_EXPECTED = re.compile(r"'(.*)', expected (.*)", re.DOTALL)  # from `arguments.wrong`
_MISSING = re.compile(r"the following arguments are required: (.*)")
_MISSING_VALUE = re.compile(r"expected (one|at least one) argument")
_UNUSED_VALUE = re.compile(r"ignored explicit argument '?(.*?)'?")


class CommandParser(argparse.ArgumentParser):
    """A parser that raises `UserError` where argparse would print its own message and exit."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self._problem(message))

    def _problem(self, message: str) -> Problem:
        """Return argparse's message as a `Problem`. A message without a rule here stays as it is."""
        fix = self._help()
        if missing := _MISSING.fullmatch(message):
            return Problem(
                f"`{self.prog}` needs {' and '.join(missing[1].split(', '))}",
                expected=self._shortest_call(),
                fix=fix,
                code="command-line",
            )
        of_argument = _OF_ARGUMENT.fullmatch(message)
        if not of_argument:
            return Problem(message, fix=fix, code="command-line")
        name, text = of_argument[1].split("/")[-1], of_argument[2]
        what, found, expected = text, "", ""
        if choice := _CHOICE.fullmatch(text):
            choices = choice[2].replace("'", "").split(", ")
            near = nearest(choice[1], choices)
            what, found, expected = "unknown value", choice[1], ", ".join(choices)
            fix = f"{name} {near}" if near else fix
        elif of_value := _EXPECTED.fullmatch(text):
            what, (found, expected) = "this value is not valid", of_value.groups()
        elif _MISSING_VALUE.fullmatch(text):
            what, expected = "the value is missing", self._values(name)
        elif unused := _UNUSED_VALUE.fullmatch(text):
            what, found, fix = "this option takes no value", unused[1], name
        return Problem(what, name, found=found, expected=expected, fix=fix, code="command-line")

    def unknown(self, word: str) -> Problem:
        """Return the problem of a word that the command does not take."""
        name = word.partition("=")[0]
        if not word.startswith("-"):
            return Problem(
                "this word is not expected here", found=word, fix=self._help(), code="command-line"
            )
        options = [text for action in upstream_private.actions_of(self) for text in action.option_strings]
        meant = renames.OPTIONS.get(name) or nearest(name, options)
        return Problem(
            f"`{self.prog}` has no option `{name}`", fix=meant or self._help(), code="command-line"
        )

    def _shortest_call(self) -> str:
        """Return the command with its required arguments."""
        needed = [action for action in upstream_private.actions_of(self) if action.required]
        words = [[*action.option_strings[-1:], self._value(action)] for action in needed]
        return " ".join([self.prog, *(word for one in words for word in one)])

    def _help(self) -> str:
        return command(*self.prog.split()[1:], "--help")

    def _values(self, name: str) -> str:
        """Return the values of an option: its choices, or the name of its value."""
        (action,) = (action for action in upstream_private.actions_of(self) if name in action.option_strings)
        return ", ".join(action.choices) if action.choices else f"{name} {self._value(action)}"

    def _value(self, action: argparse.Action) -> str:
        return str(action.metavar or action.dest.upper().replace("-", "_"))


def grouped(commands: dict[str, str]) -> str:
    """Return the help of all commands, in the groups of `GROUPS`.

    Args:
        commands: the name and the description of each command.
    """
    lines = []
    for title, members in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<9} {commands[name]}" for name in members), ""]
    return "\n".join(lines)
