"""What a finished run prints about its run checks."""

import shlex

import pytest

from finetune.cli import main
from finetune.core.console import Console
from finetune.core.run_checks import RunChecks
from finetune.reporting import scores, terminal
from finetune.run_folder.run_folder import RunFolder


@pytest.mark.parametrize(
    ("verbose", "passed", "is_table"),
    [(False, True, False), (True, True, True), (False, False, True)],
)
def test_table_of_run_checks_only_with_verbose_or_a_failed_check(verbose, passed, is_table, capsys) -> None:
    checks = RunChecks()
    checks.add("steps", 2, 2, "counted")
    checks.add("optimizer", "adamw", "adamw" if passed else "sgd", "its class")
    terminal.show_checks(Console(verbose=verbose), checks)
    said = capsys.readouterr().out
    assert f"{1 + passed} of 2 run checks passed" in said
    assert ("optimizer" in said) == is_table
    assert ("the settings printed before training are those that ran" in said) == passed
    assert ("FAILED" in said) != passed


def test_next_commands_say_what_each_is_for_and_can_be_pasted(tmp_path, capsys) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.adapter.mkdir(parents=True)
    terminal.show_next(Console(), folder)
    said = capsys.readouterr().out
    after = said.split("next, each on its own:\n")[1]
    next_steps = [line.strip().split(": ", 1) for line in after.splitlines()]
    assert [purpose for purpose, _ in next_steps] == [
        "chat with it",
        "merge the adapter",
        "serve it with vLLM",
        "preview an upload",
    ]
    for _, command in next_steps:
        main.parse(shlex.split(command)[1:])


def test_overlap_of_a_stream_is_said_of_the_examples_that_were_compared() -> None:
    whole = {"kept": 20_000, "counts": {}, "seen": 0}
    assert scores.overlap(whole) == "No validation example is in the training set."
    part = {**whole, "seen": 10_000}
    assert scores.overlap(part) == "No validation example is in the first 10,000 training examples."
    found = {**part, "counts": {"in_validation": 2}}
    assert scores.overlap(found) == "2 validation examples are also in the first 10,000 training examples."
